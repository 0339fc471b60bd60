"""A private training or inference of an experiment, and the card of what happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vfl.config import Experiment
from vfl.core.errors import RunFolderError
from vfl.core.registry import require_seconds
from vfl.datasets import PartyData
from vfl.mpc import Party, Rules, Trio
from vfl.mpc.rules import NAMES, Mode
from vfl.training.run import load_data
from vfl.triple.card import add_card, card_of, experiment_of, write_card
from vfl.triple.crew import Crew
from vfl.triple.kept import Kept, keep, keep_answers, kept_at
from vfl.triple.messages import Job
from vfl.triple.own_rows import new_rows, own_rows
from vfl.triple.plan import Plan, Terms
from vfl.triple.program import Outcome, play

JOIN_S = 120.0
Tell = Callable[[dict[str, float]], None]


def _nobody(figures: dict[str, float]) -> None:
    """Nobody is told."""


def train_private(
    experiment: Experiment,
    folder: Path,
    *,
    mode: Mode = "fast",
    rules: Rules | None = None,
    hidden: Sequence[int] = (),
    learning_rate: float = 0.5,
    processes: bool = True,
    timeout_s: float = 60.0,
    join_s: float = JOIN_S,
    weights_seed: int | None = None,
    test_every_epoch: bool = False,
    tell: Tell = lambda figures: None,
) -> dict[str, Any]:
    """Train a fully connected network that nobody holds.

    Args:
        experiment: two parties with columns, which are P0 and P1; a label party of its own is P2,
            and otherwise P2 has no data. Epochs, rows of a batch and the seed are used; models,
            codec and defense are not.
        folder: new; the card goes there, and what each party keeps into a folder of its own.
        mode: see `vfl.mpc.Rules`.
        rules: instead of the mode's own.
        hidden: widths of hidden layers; none is logistic or linear regression.
        learning_rate: of plain gradient descent.
        processes: three processes with TLS between each two, each of which loads its own party's
            columns; or three threads of this one, which then joins the parties' tables by ids.
        timeout_s: how long a party waits for another.
        join_s: how long processes may take to load their tables; more for large ones.
        weights_seed: for comparisons only: first weights that anybody can repeat.
        test_every_epoch: whether the label party is told the test rows' outputs after every epoch;
            without hidden layers enough of them tell it the test rows' columns.
        tell: told every epoch and the figures there are.

    Returns:
        The card: figures, bytes, seconds, who is who, and what each party saw.

    Raises:
        RunFolderError: the folder is there already.
        ConfigError: not exactly two parties with columns.
        DataError: see `vfl.datasets`.
        RingRangeError: a value is too large; it is named.
        PeerFailedError, LostPeerError: a party stopped.
    """
    require_waits(timeout_s, join_s)
    terms = Terms.of(
        experiment,
        rules or Rules(mode),
        hidden,
        learning_rate,
        weights_seed,
        test_every_epoch=test_every_epoch,
    )
    with new_folder(folder):
        if processes:
            jobs = _jobs(experiment, terms, timeout_s, join_s, keep_in=folder)
            outcomes = _as_processes(jobs, tell)
        else:
            joined = load_data(experiment)
            data = [joined.get(name) for name in terms.parties]
            outcomes = _as_threads([Kept(terms, {})] * 3, data, timeout_s, tell, keep_in=folder)
        card = card_of(outcomes, processes)
        write_card(folder, experiment, card)
    return card


def infer_private(
    folder: Path, *, processes: bool = True, timeout_s: float = 60.0, join_s: float = JOIN_S
) -> dict[str, Any]:
    """Answer the test rows with a network of `train_private`, from what its parties kept.

    Raises:
        RunFolderError: there is no such network, or a party's part is not of this training.
        DisagreementError: two parties have parts of two trainings.
        PeerFailedError, LostPeerError: a party stopped.
    """
    require_waits(timeout_s, join_s)
    experiment = experiment_of(folder)
    if processes:
        jobs = _jobs(experiment, None, timeout_s, join_s, kept_in=folder)
        outcomes = _as_processes(jobs)
    else:
        kept = [kept_at(folder / name, role) for role, name in enumerate(NAMES)]
        joined = load_data(experiment)
        data = [joined.get(name) for name in kept[0].terms.parties]
        outcomes = _as_threads(kept, data, timeout_s)
    return _asked(folder, outcomes, processes)


def predict_private(
    folder: Path,
    rows: Path | Mapping[str, Path],
    *,
    processes: bool = True,
    timeout_s: float = 60.0,
    join_s: float = JOIN_S,
) -> dict[str, Any]:
    """Answers for new rows, without labels, by a network of `train_private`.

    The party with the labels receives them and writes predictions.csv into its part of the run.

    Args:
        folder: of the training.
        rows: a table with the new rows of every party that has some, by its name; one table for
            all is read by each for its own columns. The party with the labels needs the ids.
        processes: as in `train_private`.
        timeout_s: how long a party waits for another.
        join_s: how long processes may take to load their tables.

    Raises:
        RunFolderError: there is no such network, or nothing was kept that reads new rows.
        BadOptionError: a party without a table, or a table without a party.
        MisalignedError: the tables hold different ids.
        DataError: see `vfl.datasets`.
        PeerFailedError, LostPeerError: a party stopped.
    """
    require_waits(timeout_s, join_s)
    experiment = experiment_of(folder)
    kept = [kept_at(folder / name, role, "predict") for role, name in enumerate(NAMES)]
    tables = new_rows(experiment, kept[0].terms, rows)
    if processes:
        jobs = _jobs(experiment, None, timeout_s, join_s, kept_in=folder, rows=tables)
        return _asked(folder, _as_processes(jobs), processes)
    data = [
        own_rows(experiment, part, role, table)
        for role, (part, table) in enumerate(zip(kept, tables, strict=True))
    ]
    return _asked(folder, _as_threads(kept, data, timeout_s, kept_in=folder), processes)


def require_waits(timeout_s: float, join_s: float) -> None:
    """Refuse waits that sockets and queues cannot take.

    Raises:
        BadOptionError: one is not finite, not above 0, or longer than a week.
    """
    require_seconds("timeout_s", timeout_s)
    require_seconds("join_s", join_s)


def _asked(folder: Path, outcomes: Sequence[Outcome], processes: bool) -> dict[str, Any]:
    card = card_of(outcomes, processes)
    add_card(folder, card)
    return card


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder; it goes again if what is done inside fails before anything is written.

    Raises:
        RunFolderError: it is there already.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise RunFolderError(
            "there is a run of that name already",
            where=str(folder),
            fix="give a folder that is not there yet, or leave --out away for one under runs/",
        ) from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # there is something in it
            folder.rmdir()
        raise


def _as_threads(
    kept: Sequence[Kept],
    data: Sequence[PartyData | None],
    timeout_s: float,
    tell: Tell = _nobody,
    *,
    keep_in: Path | None = None,
    kept_in: Path | None = None,
) -> list[Outcome]:
    def program(party: Party) -> tuple[Plan, Outcome]:
        part = kept[party.role]
        return play(party, part.terms, data[party.role], part.shares, tell)

    with Trio(kept[0].terms.rules, timeout_s=timeout_s, agreed=False) as trio:
        played = trio.run(program)
    for role, (plan, outcome) in enumerate(played):
        if keep_in is not None:
            keep(keep_in / NAMES[role], role, plan, outcome.shares, data[role])
        if kept_in is not None:
            keep_answers(kept_in / NAMES[role], data[role], outcome)
    return [outcome for _, outcome in played]


def _jobs(
    experiment: Experiment,
    terms: Terms | None,
    timeout_s: float,
    join_s: float,
    kept_in: Path | None = None,
    keep_in: Path | None = None,
    rows: Sequence[str] = ("",) * len(NAMES),
) -> list[Job]:
    return [
        Job(
            role=role,
            experiment=experiment,
            terms=terms,
            timeout_s=timeout_s,
            join_s=join_s,
            kept=str(kept_in / name) if kept_in else "",
            keep=str(keep_in / name) if keep_in else "",
            rows=rows[role],
        )
        for role, name in enumerate(NAMES)
    ]


def _as_processes(jobs: Sequence[Job], tell: Tell = _nobody) -> list[Outcome]:
    with Crew(jobs) as crew:
        return [Outcome(**(told.outcome or {})) for told in crew.run(tell)]
