"""Ledger of a party's sessions: the terms that are bound to each run name, and the spending.

The label party chooses the name of a run, and could use the same name for two different trainings.
Each party therefore binds a run name once and for all to the terms agreed under this name, and to a
nonce that the party's operating system generates. The party's keys for noise and random numbers
depend on the terms and the nonce (`party_folder.own_secret`): under another name, or with another
defense, codec or set of parties, the party never draws the same protective noise or mask again.
Under a run name that is already bound, a session must resume the training of this name, or evaluate
or predict with the trained model.

The ledger writes an entry to disk before the party sends any message that depends on the entry's
nonce. Before an epoch begins, the ledger also writes the largest possible spending of this epoch to
disk. When the session ends, the recorded spending is replaced by the actual spending, but not if
the process was killed. If a party draws protective numbers in a training (see `notes`), a journal
beside the entry records its messages (`vfl.session.store.journal`): a training that is resumed or
restarted sends an earlier message only unchanged.

If exact statistics of two sets of rows are disclosed, and the sets differ in few rows, the
statistics disclose values of these few rows. For a session with exact statistics, the ledger
therefore stores keyed digests of the session's training rows. A later session may not disclose
exact statistics if its training rows differ from the stored rows in fewer rows than the party's own
minimum; equal sets of rows are allowed.

The ledger appends each event to its log (`vfl.session.store.session_log`), which other parties can
verify.
"""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from vfl import compression, defenses
from vfl.config.party_file import STORE
from vfl.config.toml import Settings
from vfl.core.errors import ConsentError, DisagreementError, StorageError, VFLError
from vfl.core.frame import Frame
from vfl.core.seeds import Secret
from vfl.core.storage import (
    Seal,
    close_to_others,
    locked,
    read_sealed,
    read_sealed_json,
    write_sealed,
    write_sealed_json,
)
from vfl.session import rules, secure_mode
from vfl.session.schedule import Exchange
from vfl.session.store.journal import Journal
from vfl.session.store.run_rows import DIGEST
from vfl.session.store.session_log import Event, SessionLog, lines_after
from vfl.session.store.spending import Spending
from vfl.session.store.witness import Standing
from vfl.session.terms import Mode, Terms, differing

_NONCE_BYTES = 32
_SHOWN, _SHOWN_KIND = ".shown", "rows of exact statistics"
_ROUNDING = 1e-9
_DAY, _DAY_S, _PATIENCE_S = "alignments", 24 * 3600.0, 60.0
_HEX = r"^[0-9a-f]{64}$"
#: Settings that sessions under one run name may choose differently.
_UNBOUND = ("mode", "serving", "beside", "explained", "version")
State = Literal["open", "ended", "lost"]


class Spent(Settings):
    """Spending of all sessions of one mode (such as train or predict) under one run name.

    Attributes:
        sessions: number of started sessions; a resumed training counts again.
        rows: number of rows whose cuts were sent; a row counts each time that its cut was sent.
        passes: number of times that the cut of the same row was sent, as the maximum over all rows;
            messages that were sent again unchanged do not count.
        statistics: number of exact sums over this party's rows that the party has disclosed.
        bytes_up, bytes_down: bytes of frames to and from the label party, headers included.
    """

    sessions: int = 0
    rows: int = 0
    passes: int = 0
    statistics: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def plus(self, other: Spent, times: int = 1) -> Spent:
        """Return the sum of this spending and `times` times the spending in `other`."""
        sums = {
            name: getattr(self, name) + times * getattr(other, name) for name in Spent.model_fields
        }
        return Spent(**sums)


class Entry(Settings):
    """The ledger's entry for one run name.

    Attributes:
        run: name of the run.
        party: name of the party that owns the entry.
        terms: digest of the terms to which the run name is bound; see `binding_of`.
        settings: the same terms as short texts, so that an error can name the setting that differs.
        parties: names of all parties that have a stream to the label party, and of the label party
            itself.
        secure, defense, codec: the settings of these names in the terms, which `vfl sessions`
            prints.
        nonce: the party's nonce, 32 random bytes as hexadecimal digits; no other party receives the
            nonce.
        state: "open" at first; "ended" after the training has ended and its weights are stored;
            "lost" if the store was restored from a copy that was made during the training.
        weights: SHA-256 of the weights at the end of the training; None before.
        epsilon, delta: epsilon and delta that the defense states for sending the cut of one row
            once; None if the defense states no epsilon.
        training_only: whether the defense states the epsilon for training rows only, and not for
            queries.
        noted: least number of records that the journal of the training must have; fewer show that
            the journal is an older copy.
        received: for each peer, the number of exchanges up to and including the last one that this
            party received in the training.
        first, last: times at which the first and the last session under this run name began.
        spent: spending under this run name, by mode of the session.
    """

    run: str
    party: str
    terms: str = Field(pattern=_HEX)
    settings: dict[str, str]
    parties: tuple[str, ...]
    secure: str
    defense: str
    codec: str
    nonce: str = Field(pattern=_HEX, repr=False)
    state: State = "open"
    weights: str | None = Field(default=None, pattern=_HEX)
    epsilon: float | None = None
    delta: float | None = None
    training_only: bool = False
    noted: int = 0
    received: dict[str, int] = Field(default_factory=dict)
    first: str
    last: str
    spent: dict[Mode, Spent] = Field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Upper bound of the number of times that the same row was sent under this run name.

        The bound is the sum of `Spent.passes` over the modes.
        """
        return sum(each.passes for each in self.spent.values())

    @property
    def statistics(self) -> int:
        """Number of exact sums over the party's rows that were disclosed under this run name."""
        return sum(each.statistics for each in self.spent.values())

    @property
    def spent_epsilon(self) -> float | None:
        """Upper bound of the epsilon spent on one row under this run name, by basic composition.

        Source: Dwork and Roth 2014, theorem 3.16. The value is None if the defense states no
        epsilon; queries for which the defense states no epsilon are not included.
        """
        return None if self.epsilon is None else self.epsilon * self.stated_passes

    @property
    def stated_passes(self) -> int:
        """Number of times that the same row was sent in sessions to which the epsilon applies."""
        trained = self.spent.get("train", Spent()).passes
        return trained if self.training_only else self.passes

    def epsilon_of(self, mode: Mode, passes: int) -> float | None:
        """Return the epsilon of this many passes in a session of this mode.

        The result is None if no epsilon applies to such a session.
        """
        if self.epsilon is None or (self.training_only and mode != "train"):
            return None
        return self.epsilon * passes

    @property
    def owner(self) -> tuple[str, str, str]:
        """Return party, run and nonce, to which the journal of the training is bound."""
        return self.party, self.run, self.nonce

    def secret_from(self, secret: Secret) -> Secret:
        """Derive the secret of this run name from the party's secret, nonce and terms."""
        law = (self.defense, self.codec, self.secure, *self.parties)
        return Secret(secret.key("session", self.run, self.nonce, self.terms, *law))


@dataclass(slots=True)
class Meter:
    """Counts the spending of one session; the session calls it for every frame and every exchange.

    Attributes:
        rows, passes, statistics, bytes: spending so far; see `Spent`.
        most: largest possible spending of the next epoch, in a service of the next block of
            requests. Its field `passes` is 0 for an epoch, whose pass is counted when it begins.
        counted: last epoch whose passes earlier sessions have counted, if this session sends the
            same messages as these sessions; None if the messages of a repeated epoch may differ.
        trained: function that returns keyed digests of the training rows whose exact statistics are
            disclosed, uint64.
        reserve: function that is called before an epoch begins, and before statistics are
            disclosed; it records the largest spending until its next call.
        standing: object with counters of sent and received frames, which is also called for every
            frame; see `Standing`.
    """

    rows: int = 0
    passes: int = 0
    statistics: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    most: Spent = field(default_factory=Spent)
    counted: int | None = None
    trained: Callable[[], np.ndarray] = lambda: np.empty(0, DIGEST)
    reserve: Callable[[], None] = lambda: None
    standing: Standing | None = None

    def __call__(self, party: str, direction: str, frame: Frame) -> None:
        self.bytes[direction] += frame.wire_bytes
        if self.standing is not None:
            self.standing(party, direction, frame)

    def through(self, schedule: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the same exchanges, and count each exchange when it begins."""
        epoch = None
        for exchange in schedule:
            if exchange.epoch != epoch:
                epoch = exchange.epoch
                self._count(epoch)
                self.reserve()
            self.rows += len(exchange.rows)
            yield exchange

    def show(self, count: int) -> None:
        """Record that this many exact statistics will be disclosed.

        The session calls this method before it discloses the statistics.

        Raises:
            ConsentError: the number of statistics would exceed the party's limit, or the rows are
                almost the same as the rows of earlier statistics.
        """
        self.statistics += count
        self.reserve()

    def spent(self, *, coming: bool) -> Spent:
        """Return the session's spending so far.

        If `coming` is True, add the largest spending of the next epoch.
        """
        taken = Spent(
            rows=self.rows,
            passes=self.passes,
            statistics=self.statistics,
            bytes_up=self.bytes["up"],
            bytes_down=self.bytes["down"],
        )
        return taken.plus(self.most) if coming else taken

    def _count(self, epoch: int) -> None:
        if self.counted is None:
            self.passes += 1
        elif epoch > self.counted:
            self.passes += 1
            self.counted = epoch


@dataclass(slots=True)
class Day:
    """Alignments of the last 24 hours, and the ids that other parties queried in them.

    Attributes:
        begun, asked: time in seconds and number: of alignments that began, and of queried ids.
    """

    begun: list[tuple[float, int]] = field(default_factory=list)
    asked: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Day:
        """Read a record; in those of earlier versions an alignment has a time and no number."""
        since = time.time() - _DAY_S
        begun, asked = (
            [(one[0], one[1] if len(one) > 1 else 1) for one in record[name] if one[0] > since]
            for name in ("begun", "asked")
        )
        return cls(begun, asked)

    @property
    def alignments(self) -> int:
        """Number of alignments that began."""
        return sum(count for _, count in self.begun)

    @property
    def ids(self) -> int:
        """Number of queried ids."""
        return sum(count for _, count in self.asked)

    def begin(self, alignments: int = 1) -> None:
        """Add alignments that begin now."""
        self.begun.append((self._now, alignments))

    def ask(self, ids: int) -> None:
        """Add ids that another party queries now."""
        self.asked.append((self._now, ids))

    @property
    def _now(self) -> float:
        """Current time, or a later recorded time if the clock was set back since."""
        return max([time.time(), *(when for when, _ in self.begun + self.asked)])


class SessionLedger(Spending[Entry]):
    """One party's ledger of sessions, which all processes of the party use.

    Args:
        folder: see `Spending`.
        party: party that owns the ledger.
        max_epsilon: limit of the epsilon that sessions under all run names together may spend on
            one row's inputs; None sets no limit.
        others: ledgers of products (other kinds of training) in the same store; their spending
            counts for the same limit.
        max_statistics: limit of the number of exact statistics of the party's rows that sessions
            under all run names together may disclose; None sets no limit.
        min_changed_rows: if exact statistics of two different sets of rows are disclosed, the least
            number of rows in which the sets must differ.
        log: log to which the ledger appends lines; None makes a log whose lines are not signed.
        max_alignments: limit of the number of alignments within 24 hours.
    """

    kind, form = "session", Entry

    def __init__(
        self,
        folder: Path,
        party: str,
        max_epsilon: float | None = None,
        others: Sequence[Spending[Any]] = (),
        log: SessionLog | None = None,
        max_statistics: int | None = None,
        min_changed_rows: int = 1,
        max_alignments: int = 0,
    ) -> None:
        super().__init__(folder, party)
        self.max_epsilon, self.others = max_epsilon, others
        self.max_statistics, self.min_changed_rows = max_statistics, min_changed_rows
        self.max_alignments = max_alignments
        self.log = log or SessionLog(folder, party)

    def begin(self, terms: Terms, start: int | None = None) -> Entry:
        """Bind a run name to a session's terms, or check that the name is bound to these terms.

        Args:
            terms: terms of the session.
            start: number of the session's first exchange; None if this party chooses it.

        Raises:
            DisagreementError: the name is bound to other terms; or the session needs a trained run
                and there is none; or the session begins a training whose name has ended; or the
                store was restored from a copy that was made during the training.
            ConsentError: the session would spend more than the party's limits allow.
            RunFolderError: the entry is damaged.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with locked(self.folder, math.inf):
            close_to_others(self.folder)
            close_to_others(self.folder.parent, STORE)
            entry = self._read(terms.run)
            if entry is None:
                if terms.mode != "train":
                    raise _no_training(terms, self.party)
                entry = _bound(terms, self.party, now)
                self._check_planned(entry, terms)
                if notes(terms, self.party):  # the journal must exist before the run name is bound
                    Journal.create(self._journal(terms.run), entry.owner)
            else:
                self._check(entry, terms, start)
                self._check_planned(entry, terms)
            spent = entry.spent.get(terms.mode, Spent()).plus(Spent(sessions=1))
            entry = entry.model_copy(
                update={"last": now, "spent": {**entry.spent, terms.mode: spent}}
            )
            self._write(entry)
            self.log.append("begun", **_asked(terms))
        return entry

    def note(self, event: Event, **facts: Any) -> None:
        """Append a line to the log; see `SessionLog.append`.

        Raises:
            StorageError: the line cannot be written.
        """
        with self.locked():
            self.log.append(event, **facts)

    @contextmanager
    def refusing(self, terms: Terms) -> Iterator[None]:
        """If the `with` block refuses a session, write a line with the reason to the log."""
        try:
            yield
        except VFLError as error:
            with suppress(StorageError):  # the caller receives the refusal in any case
                self.note("refused", **_asked(terms), outcome=_outcome(error))
            raise

    @contextmanager
    def noted(self, terms: Terms) -> Iterator[Standing]:
        """Log the start and the end of a session that spends no budget, as an alignment.

        Yields:
            the counters with which the parties notice that a store was restored.

        Raises:
            StorageError: the line about the start of the session cannot be written.
        """
        self.note("begun", **_asked(terms))
        standing = Standing(
            self.witness, self.party, terms.run, terms.label_party, head=self.log.head
        )
        try:
            with self._ending(terms, lambda: {"heads": standing.heads}):
                yield standing
        finally:
            standing.write()

    @contextmanager
    def _ending(self, terms: Terms, took: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Write a log line about how a session ended and what it spent."""
        outcome = "well"
        try:
            yield
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            with suppress(StorageError):  # on a full disk, this line is not written
                self.note("ended", **_asked(terms), **took(), outcome=outcome)

    @contextmanager
    def session(
        self, terms: Terms, start: int | None = None
    ) -> Iterator[tuple[Entry, Meter, Journal | None]]:
        """Take part in a session: call `begin`, and record the spending before it occurs.

        When the session ends, the recorded spending is replaced by the actual spending.

        Yields:
            the entry of the run name, the meter, and the journal of messages (None if the party
            needs no journal; see `notes`).

        Raises:
            DisagreementError, ConsentError: see `begin`.
            RunFolderError: the entry or the journal is damaged, or the journal is missing.
        """
        with self.refusing(terms):
            entry = self.begin(terms, start)
        meter, journal = Meter(), None
        if notes(terms, self.party):
            closed = entry.state == "ended"
            peers: Sequence[str] = ("",)
            if self.party == terms.label_party:
                peers = rules.peers(terms)
            if self.party in terms.takers:
                peers = ("", *terms.feature_parties)
            path = self._journal(terms.run)
            journal = Journal(path, entry.owner, peers, closed=closed, least=entry.noted)
            meter.counted = entry.spent["train"].passes
        noted = (lambda: None) if journal is None else (lambda: journal.steps)
        meter.standing = standing = Standing(
            self.witness,
            self.party,
            terms.run,
            terms.label_party,
            noted,
            entry.received,
            self.log.head,
        )
        written = Spent()

        def spend(*, coming: bool) -> None:
            nonlocal written
            if journal is not None:
                journal.sync()
            standing.write()
            now, noted = meter.spent(coming=coming), 0 if journal is None else len(journal)
            more = {"received": standing.received} | ({"noted": noted} if noted else {})
            try:
                self._spend(terms, written, now, more, meter.trained, checked=coming)
            except ConsentError:
                meter.passes, meter.statistics = written.passes, written.statistics
                raise
            written = now

        def took() -> dict[str, Any]:
            spent = meter.spent(coming=False)
            return {
                **spent.model_dump(exclude={"sessions"}),
                "epsilon": entry.epsilon_of(terms.mode, spent.passes),
                "heads": standing.heads,
            }

        meter.reserve = lambda: spend(coming=True)
        try:
            with self._ending(terms, took):
                yield entry, meter, journal
        finally:
            try:
                spend(coming=False)
            finally:
                if journal is not None:
                    journal.close()

    def _spend(
        self,
        terms: Terms,
        written: Spent,
        now: Spent,
        more: dict[str, Any],
        trained: Callable[[], np.ndarray],
        *,
        checked: bool,
    ) -> None:
        """Replace the recorded spending of a session by the present spending of its meter.

        Raises:
            ConsentError: the spending would exceed a limit of the party; see also `Meter.show`.
        """
        with locked(self.folder, math.inf):
            entry = self._found(terms.run)
            before = entry.spent[terms.mode]
            spent = before.plus(now).plus(written, -1)
            if checked and spent.passes > before.passes:  # other sessions may have spent meanwhile
                self._check_epsilon(entry, terms, spent.passes - before.passes)
            if checked and spent.statistics > before.statistics:
                self._check_statistics(spent.statistics - before.statistics)
                self._check_rows(terms.run, trained)
            changed = more | {"spent": {**entry.spent, terms.mode: spent}}
            self._write(entry.model_copy(update=changed))

    def _check_planned(self, entry: Entry, terms: Terms) -> None:
        """Refuse a session that is planned to exceed `max_epsilon`, before its first message."""
        passes = 1
        if terms.mode == "train":  # repeating a message unchanged discloses nothing new
            passes = terms.train.epochs - entry.spent.get("train", Spent()).passes
            passes = 0 if entry.state == "ended" else passes
        self._check_epsilon(entry, terms, passes)

    def _check_epsilon(self, entry: Entry, terms: Terms, passes: int) -> None:
        if self.max_epsilon is None or self.party not in terms.feature_parties:
            return
        asks = terms.mode != "train" or terms.validation + terms.test > 0
        stated = None if entry.training_only and asks else entry.epsilon
        self.require_epsilon(math.inf if stated is None else stated * passes)

    def _check_statistics(self, count: int) -> None:
        """Refuse to disclose more than `max_statistics` exact statistics in all sessions."""
        most = self.max_statistics
        if most is not None and (shown := self.spent_statistics()) + count > most:
            raise ConsentError(
                f"party '{self.party}' does not consent to disclose more exact statistics "
                "of its rows",
                where="ledger of sessions",
                got=f"{shown} disclosed under all names, and {count} more requested",
                want=f"at most {most} under all names",
                fix="use fewer columns or bins, or set a larger max_statistics in the party's own "
                "file",
            )

    def _check_rows(self, run: str, rows: Callable[[], np.ndarray]) -> None:
        """Refuse exact statistics of almost the same rows as those of earlier statistics.

        Otherwise record the rows.
        """
        own, least = self.folder / f"{run}{_SHOWN}", self.min_changed_rows
        if own.exists():  # all sessions of one training use the same rows
            return
        trained = np.unique(rows())
        for path in sorted(self.folder.glob(f"*{_SHOWN}")):
            changed = len(np.setxor1d(trained, self._shown(path), assume_unique=True))
            if 0 < changed < least:
                raise ConsentError(
                    f"party '{self.party}' does not consent to disclose exact statistics "
                    "of almost the same rows again: the difference would disclose the "
                    "rows that changed",
                    where=f"training rows of '{run}', compared with those of '{path.stem}'",
                    got=f"fewer than {least} rows differ",
                    want=f"the same rows, or at least {least} rows that differ",
                    fix="train on the rows of that run; or wait for more new rows; or set "
                    "min_changed_rows = 1 in the party's own file, which accepts that changed "
                    "rows are disclosed",
                )
        seal = Seal(_SHOWN_KIND, self.party, run)
        write_sealed(own, [trained.astype(DIGEST).tobytes()], seal)

    def forget_shown(self, digests: np.ndarray) -> None:
        """Overwrite the digests of erased rows with random digests; row counts stay equal.

        Args:
            digests: keyed digests of the erased rows, uint64.
        """
        with self.locked():
            for path in sorted(self.folder.glob(f"*{_SHOWN}")):
                shown = self._shown(path).copy()
                places = np.flatnonzero(np.isin(shown, digests))
                if len(places):
                    drawn = secrets.token_bytes(DIGEST.itemsize * len(places))
                    shown[places] = np.frombuffer(drawn, DIGEST)
                    seal = Seal(_SHOWN_KIND, self.party, path.stem)
                    write_sealed(path, [np.unique(shown).tobytes()], seal)

    def _shown(self, path: Path) -> np.ndarray:
        """Read digests of rows whose exact statistics were disclosed, uint64, ascending."""
        return np.frombuffer(read_sealed(path, Seal(_SHOWN_KIND, self.party, path.stem)), DIGEST)

    def spent_statistics(self) -> int:
        """Return the number of exact statistics that sessions under all run names have disclosed.

        The number includes statistics that the store may have lost when it was restored.
        """
        shown = sum(entry.statistics for entry in super().entries())
        return shown + self.witness.read().lost_statistics

    def require_epsilon(self, planned: float) -> None:
        """Refuse a session if planned and spent epsilon together exceed `max_epsilon`.

        Args:
            planned: epsilon that the session would spend on one row's inputs; infinite if the
                defense states no epsilon.

        Raises:
            ConsentError: the planned epsilon and the spent epsilon together exceed the limit.
        """
        if self.max_epsilon is None:
            return
        spent = self.spent_epsilon()
        if spent + planned > self.max_epsilon * (1 + _ROUNDING):
            more, fix = f"{planned:.4g} planned", "use fewer epochs or more noise, or set a larger "
            if math.isinf(planned):
                more, fix = "without an epsilon", "use a defense that states one, or remove "
            raise ConsentError(
                f"party '{self.party}' does not consent to spend more of its rows' privacy",
                where="ledger of sessions",
                got=f"epsilon {spent:.4g} spent under all names, and a session {more}",
                want=f"epsilon <= {self.max_epsilon:g} in all",
                fix=f"{fix}max_epsilon in the party's own file",
            )

    def end(self, run: str, weights: str) -> None:
        """Record that the training of a run name has ended; called before its weights are stored.

        If a training has ended at this party but not at the label party, the label party resumes
        it; the resumed training must then yield the same weights. Evaluations may already have used
        the recorded weights, so different weights are refused.

        Args:
            run: name of the run.
            weights: SHA-256 of the weights.

        Raises:
            DisagreementError: the training has already ended with different weights.
        """
        with locked(self.folder, math.inf):
            entry = self._found(run)
            if entry.state == "ended" and entry.weights != weights:
                raise DisagreementError(
                    f"the training '{run}' has ended at party '{self.party}', but with other "
                    "weights",
                    got=f"weights {weights[:8]}...",
                    want=f"weights {str(entry.weights)[:8]}..., which the party keeps",
                    fix="train under another name",
                )
            self._write(entry.model_copy(update={"state": "ended", "weights": weights}))

    def restored(self) -> None:
        """Record that the store was restored from a copy, as the party's owner declared.

        Amounts that may have been spent after the copy was made count as spent.

        Trainings that were running are not continued; all of `max_epsilon`, `max_statistics` and,
        for 24 hours, `max_alignments` counts as spent; and the counter that peers compare increases
        beyond all values that peers can know.
        """
        with locked(self.folder, math.inf):
            self.give_up()
            for other in self.others:
                other.give_up()
            known = self.spent_epsilon()
            most = known if self.max_epsilon is None else self.max_epsilon
            shown = self.spent_statistics()
            allowed = shown if self.max_statistics is None else self.max_statistics
            self.witness.restored(max(0.0, most - known), max(0, allowed - shown))
            with self.day() as day:
                day.begin(self.max_alignments)
            self.log.append("restored")

    def was_restored_since(self, since: float) -> bool:
        """Return whether the party declared a restore at or after a time, in seconds since 1970."""
        return any(
            line.event == "restored" and datetime.fromisoformat(line.at).timestamp() >= since
            for line in lines_after(self.log.path, 0)[0]
        )

    @contextmanager
    def day(self) -> Iterator[Day]:
        """Yield the counts of alignments of the last 24 hours; then save changes.

        Raises:
            RunFolderError: the file is damaged.
        """
        folder, seal = self.folder / _DAY, Seal("alignments and ids of a day", self.party, "")
        # earlier versions kept the counts beside alignments, which a party may restore from a copy
        paths = folder / "asked.json", self.folder.parent / "alignments" / "_asked.json"
        with locked(folder, _PATIENCE_S):
            found = next((path for path in paths if path.exists()), None)
            kept = Day() if found is None else Day.of(read_sealed_json(found, seal))
            yield kept
            write_sealed_json(paths[0], {"begun": kept.begun, "asked": kept.asked}, seal)

    def entries(self) -> list[Entry]:
        """Return the entries of all run names, ordered by their last use.

        Raises:
            RunFolderError: an entry is damaged.
        """
        return sorted(super().entries(), key=lambda entry: entry.last)

    def spent_epsilon(self) -> float:
        """Return the epsilon spent on one row: by sessions, products, and lost entries."""
        others = sum(other.spent_epsilon() for other in self.others)
        return super().spent_epsilon() + others + self.witness.read().lost_epsilon

    def give_up(self) -> None:
        """See `Spending.give_up`."""
        for entry in self.entries():
            if entry.state == "open":
                self._write(entry.model_copy(update={"state": "lost"}))

    def _check(self, entry: Entry, terms: Terms, start: int | None) -> None:
        if not hmac.compare_digest(entry.terms, binding_of(terms)):
            got, want = differing(_settings(terms), _bound_only(entry.settings))
            raise DisagreementError(
                f"the name '{terms.run}' is bound to another session at party '{self.party}'",
                where="ledger of sessions",
                got=got,
                want=want,
                fix="evaluate and predict with the terms of the training; train under another name",
            )
        if terms.mode != "train" and entry.state != "ended":
            raise _no_training(terms, self.party)
        if terms.mode == "train" and entry.state == "lost":
            raise DisagreementError(
                f"party '{self.party}' has no record of the messages that it sent in the training "
                f"'{terms.run}'",
                where="ledger of sessions",
                got="a store that was restored from a copy, which was made during the training",
                want="a training that began after the copy was made, or had ended before",
                fix="train under another name",
            )
        if terms.mode == "train" and entry.state == "ended" and start == 0:
            raise DisagreementError(
                f"the training '{terms.run}' has already ended at party '{self.party}'",
                where="ledger of sessions",
                got="a request to begin the same training again",
                want="a request to resume from a checkpoint, to evaluate or to predict",
                fix="train under another name",
            )

    def _journal(self, run: str) -> Path:
        return self.folder / f"{run}.sent"


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the fields of a log line that describe a requested session."""
    return {
        "run": terms.run,
        "mode": terms.mode,
        "asked_by": terms.label_party,
        "parties": tuple(dict.fromkeys([*rules.peers(terms), terms.label_party])),
        "purpose": terms.purpose,
        "terms": terms.digest(),
    }


def _outcome(error: BaseException) -> str:
    """Return the code and text of a vfl error for the log.

    For any other error, return only its type.
    """
    if isinstance(error, VFLError):
        return f"{error.code}: {error.what}"[:2000]
    return type(error).__name__


def binding_of(terms: Terms) -> str:
    """Return the digest of the terms to which a run name is bound."""
    return terms.digest(*_UNBOUND)


def notes(terms: Terms, party: str) -> bool:
    """Return whether a party needs a journal of its messages, because it draws protective numbers.

    A party draws protective numbers if a defense promises privacy or changes the party's messages,
    or if the party encodes cuts with a codec that chooses at random. The masks and shares of a
    secure mode are new in every attempt, and need no journal. The noise that is hidden by these
    masks needs a journal, so the journal contains digests of the content before masking.
    Evaluations and predictions never send an exchange again, so they need no journal; the ledger
    counts them.
    """
    if terms.mode != "train" or party == rules.dealer(terms):
        return False
    # the middle party sends cuts and gradients
    if terms.middle is not None and party == terms.middle.party:
        return compression.make(terms.middle.codec).draws or compression.make(terms.codec).draws
    defense = defenses.make(terms.defense)
    if party in (terms.label_party, *terms.tasks):
        return defenses.protects(defense, "label")
    if secure_mode.shares_weights(terms):  # then no party has a cut that a defense could change
        return False
    drawn = terms.secure == "none" and compression.make(terms.codec).draws
    return drawn or defenses.protects(defense, "feature")


def total_epsilon(entries: Iterable[Entry]) -> float:
    """Return the epsilon spent on one row under these run names together, by basic composition."""
    return sum(entry.spent_epsilon or 0.0 for entry in entries)


def _bound(terms: Terms, party: str, now: str) -> Entry:
    # Only statements about a row's inputs in one exchange count; of these statements, the one with
    # the smallest epsilon applies.
    stated = [
        (one.epsilon, one.delta or 0.0, one.training_only)
        for one in defenses.make(terms.defense).privacy()
        if one.epsilon is not None and one.kind[:3] == ("inputs", "record", "exchange")
    ]
    epsilon, delta, training_only = min(stated, default=(None, None, False))
    return Entry(
        run=terms.run,
        party=party,
        terms=binding_of(terms),
        settings=_settings(terms),
        parties=tuple(dict.fromkeys([*rules.peers(terms), terms.label_party])),
        secure=terms.secure,
        defense=terms.defense,
        codec=terms.codec,
        nonce=secrets.token_bytes(_NONCE_BYTES).hex(),
        epsilon=epsilon,
        delta=delta,
        training_only=training_only,
        first=now,
        last=now,
    )


def _settings(terms: Terms) -> dict[str, str]:
    return _bound_only(terms.settings())


def _bound_only(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in _UNBOUND}


def _no_training(terms: Terms, party: str) -> DisagreementError:
    return DisagreementError(
        f"at party '{party}', no training of the name '{terms.run}' has ended",
        where="ledger of sessions",
        got=f"mode {terms.mode}",
        want="the name of a training that has ended at this party",
        fix="train first, or resume the interrupted training",
    )
