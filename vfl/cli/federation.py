"""``vfl up``, ``sessions`` and ``renew``: a party's services, its session records and its keys."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from vfl.cli.output import Json, OwnFile, argument, emit, option, say
from vfl.core.errors import LostPeerError, PeerError, RenamedWarning
from vfl.core.products import listening_in
from vfl.core.text import log_entries, logged
from vfl.core.traffic import size

if TYPE_CHECKING:
    from vfl.config import Experiment, PartyFile
    from vfl.core.processes import Service
    from vfl.federation.project import LabelFolder
    from vfl.session.ranks.processes import Order
    from vfl.session.store.session_ledger import Entry

_LOOK_EVERY_S, _TEND_EVERY_S = 0.2, 3.0
#: Shortest and longest pause in seconds before a rank on another machine tries again after an
#: error.
_REST_S, _LONGEST_REST_S = 1.0, 10.0


def _number_of_ranks(text: str) -> int:
    from vfl.config.party_file import MAX_RANKS
    from vfl.core.processes import usable_cores

    if text == "auto":
        return min(usable_cores(), MAX_RANKS)
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise typer.BadParameter(f"a number from 1 to {MAX_RANKS}, or auto for one per core")
    return int(text)


Ranks = Annotated[
    int | None,
    option(
        "Processes at this party that share every batch of a training; auto is one per core.",
        "N|auto",
        parser=_number_of_ranks,
    ),
]
_OURS = re.compile(r"vfl: |error\[V|  (where|got  |want |try  |more ) ")


def up(
    path: Annotated[
        Path,
        argument(
            "The project or its label folder; or another party's folder or own file.",
            "PROJECT|PARTY",
        ),
    ] = Path(),
    accept: Annotated[
        list[str] | None,
        option(
            "For a project: first accept the key with this fingerprint, which its owner confirmed.",
            "NAME.pub=TEXT",
        ),
    ] = None,
    ranks: Ranks = None,
    rank: Annotated[
        int | None,
        option(
            "Run as this further rank on another machine; party.toml must set node.ranks_at.",
            min=1,
            max=63,
        ),
    ] = None,
) -> None:
    """Run a party until it is interrupted: its Flower service and a long-lived worker process.

    For the label party, PROJECT: the SuperLink, which registers the parties' keys. For any other
    party, its folder or party.toml: the SuperNode, which is restarted when it ends. The command
    prints vfl's messages about sessions. While it runs at the label party, the commands train,
    evaluate and predict start sooner, because the worker has already made their imports.
    """
    from vfl.config.party_file import RANKS_VARIABLE
    from vfl.federation.project import LabelFolder

    if ranks is not None:
        os.environ[RANKS_VARIABLE] = str(ranks)
    folder, file = (path, path / "party.toml") if path.is_dir() else (path.parent, path)
    if rank is not None:
        _run_rank(file, rank)
    if (folder / "app").is_dir() or (path.is_dir() and not file.exists()):
        label = LabelFolder.find(folder)
        for given in accept or ():
            from vfl.federation import members

            key, _, read_out = given.partition("=")
            members.accept(label.path, Path(key), read_out)
        _run_superlink(label)
    elif accept:
        raise typer.BadParameter(
            "only a project accepts keys here; another party runs vfl party accept",
            param_hint="--accept",
        )
    else:
        _run_supernode(file)


def superlink(project: Annotated[Path, typer.Argument(metavar="PROJECT")] = Path()) -> None:
    """Former name of `vfl up PROJECT`."""
    _renamed("superlink PROJECT", "up PROJECT")
    up(project)


def supernode(party_file: OwnFile, ranks: Ranks = None) -> None:
    """Former name of `vfl up party.toml`."""
    _renamed("supernode party.toml", "up party.toml")
    up(party_file, ranks=ranks)


def _renamed(former: str, today: str) -> None:
    message = f"the command 'vfl {former}' is called 'vfl {today}' now"
    warnings.warn(message, RenamedWarning, stacklevel=3)


def _run_superlink(label: LabelFolder) -> None:
    from vfl.federation import deployment

    _renew_when_due(label)
    for warning in label.certificate_warnings():
        say(warning)
    say("starting the SuperLink")
    with deployment.kept_worker_of(label) as supervise:
        _follow_superlink(label, supervise)


def _follow_superlink(label: LabelFolder, supervise: Callable[[], None]) -> NoReturn:
    from vfl.federation import deployment

    service, tend = deployment.start_superlink(label), _tender(label)
    try:
        new = deployment.register_nodes(label)
        address = label.experiment().federation.superlink
        say(f"the SuperLink listens on {address}; new keys: {', '.join(new) or 'none'}")
        _say_waiting(label, new)
        files = {name: label.certificates / name for name in ("ca.pem", "server.pem")}
        with _monitored(label.party(), files, lambda: service.alive):
            _follow(service, supervise, tend)
        raise LostPeerError(
            f"{service.name} ended",
            got=f"exit {service.wait()}",
            fix=f"see {service.log}, start it again, then vfl train PROJECT --resume RUN",
        )
    finally:
        service.stop()


def _tender(label: LabelFolder) -> Callable[[], None]:
    """Return a function that registers accepted keys and renews the SuperLink's certificate."""
    from vfl.core.errors import UserError
    from vfl.federation import deployment

    def stamps() -> dict[str, int]:
        return {key.name: key.stat().st_mtime_ns for key in label.keys.glob("*.*")}

    known, failure = stamps(), ""

    def tend() -> None:
        nonlocal known, failure
        _renew_when_due(label)
        if (now := stamps()) == known:
            return
        try:
            new = deployment.register_nodes(label)
        except (UserError, PeerError) as problem:
            if failure != (text := str(problem)):
                print(logged(text), file=sys.stderr, flush=True)
            failure = text
            # an error that stays until a key changes; another party may remove its cause
            if isinstance(problem, UserError):
                known = now
        else:
            known, failure = now, ""
            _say_waiting(label, new)

    return tend


def _renew_when_due(label: LabelFolder) -> None:
    """Renew the SuperLink's certificate if it expires soon; print an error that prevents this."""
    from vfl.core.errors import UserError
    from vfl.transport import renew_when_due

    try:
        days = label.experiment().federation.certificate_days
        if renew_when_due(label.certificates, days):
            say("renewed the certificate of the SuperLink")
    except UserError as problem:  # the old certificate may still be valid for weeks
        print(logged(str(problem)), file=sys.stderr, flush=True)


def _say_waiting(label: LabelFolder, new: Sequence[str]) -> None:
    """Print newly registered keys, and keys whose fingerprints the label party must compare."""
    from vfl.federation import deployment
    from vfl.transport import fingerprint

    for name in new:
        say(f"the key of {name} is registered")
    for name in deployment.waiting_keys(label):
        key = label.keys / f"{name}.pub"
        say(f"the key of {name} is {fingerprint(key.read_bytes())}; if {name} reads this aloud:")
        say(f"vfl party accept {key} {label.path} --fingerprint TEXT")


def _run_supernode(party_file: Path) -> None:
    """Run the party's SuperNode, and restart the SuperNode when it ends.

    Raises:
        VFLError: waiting cannot remove the cause, or the SuperNode has failed to start for five
            minutes; see `vfl.core.processes.supervise`.
    """
    from vfl.config import read_party_file
    from vfl.core.processes import supervise
    from vfl.federation import deployment
    from vfl.transport import expiry_warning

    party = read_party_file(party_file)
    ca = party.beside(party.node.ca)
    if ca.exists() and (warning := expiry_warning(ca, "ask the label party for its new ca.pem")):
        say(warning)

    services: list[Service] = []

    def start() -> Service:
        say(f"connecting party {party.party} to {party.node.superlink}")
        service = deployment.start_supernode(party, party_file)
        say(f"party {party.party} is connected to {party.node.superlink}")
        services[:] = [service]
        return service

    with (
        deployment.kept_worker_of(party) as look_after,
        _monitored(party, {"ca.pem": ca}, lambda: any(each.alive for each in services)),
    ):
        supervise(start, lambda service: _follow(service, look_after), say)


@contextmanager
def _monitored(
    party: PartyFile, certificates: Mapping[str, Path], is_up: Callable[[], bool]
) -> Iterator[None]:
    """Until the block ends, serve a party's metrics and send its spans, if its file has [monitor].

    Args:
        party: the party's own file.
        certificates: certificates whose remaining days are a metric, by name.
        is_up: function that returns whether the party's service runs.
    """
    with ExitStack() as stack:
        if party.monitor is not None:
            from vfl.federation.monitor import monitored  # imported late, because it needs torch

            stack.enter_context(monitored(party, certificates, is_up, say))
            if party.monitor.spans is not None:
                from vfl.federation.spans import traced

                stack.enter_context(traced(party, party.monitor.spans))
        yield


def _play_rank(order: Order) -> None:
    """Run one rank in the session that rank 0's order describes; import only this party's code."""
    if order["side"] == "feature":
        from vfl.clients.session import play_rank
    else:
        from vfl.server.rank import play_rank
    play_rank(order)


def _run_rank(party_file: Path, rank: int) -> NoReturn:
    """Run one session after another; print an error of a peer, then wait and try again."""
    from vfl.core.seeds import use_one_thread
    from vfl.session.ranks.machines import joined

    use_one_thread()
    rest_s = _REST_S
    while True:
        say(f"rank {rank} waits for rank 0")
        try:
            with joined(party_file, rank, say) as order:
                _play_rank(order)
            say(f"rank {rank} is done")
            rest_s = _REST_S
        except PeerError as error:
            print(logged(str(error)), file=sys.stderr, flush=True)
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)


def sessions(
    party_file: OwnFile,
    json: Json = False,
    restored: Annotated[
        bool,
        option(
            "The store was restored from a copy: end trainings that were running, count all of "
            "max_epsilon, max_statistics and, for a day, max_alignments as spent, and take part "
            "again.",
        ),
    ] = False,
) -> None:
    """List the sessions in which a party has taken part, the latest session last.

    A run's name stands for one training with its evaluations and predictions, with the same
    parties, codec, defense and secure mode. A row is counted each time that the party sends the
    row's cut. The epsilon is the defense's epsilon for sending the inputs of one row once, times
    the largest number of times that any single row was sent; it is "-" if the defense states no
    epsilon. The last lines have the sums over all runs.
    """
    from vfl.config import read_party_file
    from vfl.session.store.party_folder import own_ledger

    party = read_party_file(party_file)
    ledger = own_ledger(party)
    if restored:
        ledger.restored()
    entries, lost = ledger.entries(), ledger.witness.read().lost_epsilon
    if json:
        emit([_facts(entry) for entry in entries])
        return
    for entry in entries:
        print(f"{entry.run}  {entry.state}, with {', '.join(entry.parties)}")
        print(f"  {entry.defense} defense, {entry.codec} codec, {entry.secure} secure mode")
        for mode, spent in entry.spent.items():
            sent = f"{size(spent.bytes_up)} up, {size(spent.bytes_down)} down"
            print(f"  {mode:<9} {spent.sessions} begun, {spent.rows} rows, {sent}")
        print(f"  epsilon   {_epsilon(entry)}")
        if entry.statistics:
            print(f"  {entry.statistics:,} exact statistics of this party's rows were disclosed")
        print(f"  from {entry.first} to {entry.last}")
    others = [(each, one.kind) for one in ledger.others for each in one.entries()]
    for each, kind in others:
        print(f"{each.run}  {kind}, epsilon {each.spent_epsilon or 0:.4g}")
    if entries or others:
        more = sum(each.spent_epsilon or 0.0 for each, _ in others)
        print(_total(entries, more, party.consent.max_epsilon, lost))
        if shown := ledger.spent_statistics():
            most = party.consent.max_statistics
            print(f"all names: {shown:,} statistics" + ("" if most is None else f" of {most:,}"))
    else:
        print("no session yet")


def renew(
    path: Annotated[
        Path,
        argument(
            "The project, to renew its certificate; or a party's file, to replace its key.",
            "PROJECT|party.toml",
        ),
    ],
    authority: Annotated[
        bool, option("Create a new authority, which the next renewal uses.", "--authority")
    ] = False,
    identity: Annotated[
        bool,
        option(
            "With party.toml: replace the party's identity key, which secures pairs of parties and "
            "signs the party's log.",
            "--identity",
        ),
    ] = False,
) -> None:
    """Renew the SuperLink's certificate, or replace a party's key.

    PROJECT, or its label folder: a new certificate for the SuperLink under the same authority,
    without any action of other parties. The folder of a party of vfl llm: the same. With
    party.toml: a new key of that party's SuperNode, or with --identity a new identity key, which
    the other parties must accept. docs/security.md describes the whole procedure.
    """
    from vfl.config import is_party_file, read_party_file
    from vfl.federation.joining import write_public
    from vfl.federation.project import LabelFolder
    from vfl.transport import renew_node_key, renew_server, replace_authority

    if not path.is_dir() and is_party_file(path):
        if authority:
            raise typer.BadParameter(
                "only the label party has an authority", param_hint="--authority"
            )
        party = read_party_file(path)
        if identity:
            _new_identity(party)
            return
        private = party.beside(party.node.key)
        renew_node_key(private)
        public = write_public(party)
        say(f"wrote {private} and {public.file}, fingerprint {public.fingerprint}")
        say(f"send {public.file.name} to the label party, and read the fingerprint aloud; it runs:")
        say(f"vfl party accept {public.file.name} PROJECT --fingerprint TEXT")
        say("the old key then becomes invalid: restart vfl up")
        return
    if identity:
        raise typer.BadParameter(
            "an identity key belongs to one party: give its party.toml", param_hint="--identity"
        )
    stands = listening_in(path)
    label = None if stands else LabelFolder.find(path)
    certificates = path / "certificates" if label is None else label.certificates
    if authority:
        replace_authority(certificates)
        say(f"{certificates / 'ca.pem'} trusts a new authority and the old one")
        say("send it to every party as its ca.pem, and let them restart vfl up")
        say("when all have it: vfl renew PROJECT")
    else:
        asked = [] if label is None else [label.experiment().federation.certificate_days]
        days = renew_server(certificates, *asked)
        then = f"restart {stands}" if stands else "vfl up uses it for new connections"
        say(f"{certificates / 'server.pem'} is valid for {days} days; {then}")


def _preload_parties() -> None:
    """Import the session code of all roles once, so that child processes need not import it."""
    import vfl.clients.app
    import vfl.server.app  # noqa: F401


def _preload_commands() -> None:
    """Import the modules of the label party's commands and of its HTTP service."""
    import vfl.experiments.pages
    import vfl.experiments.plan
    import vfl.serving.front
    import vfl.training.federated
    import vfl.training.specs  # noqa: F401


_PRELOADS: Mapping[str, Sequence[Callable[[], None]]] = {
    "flower-superexec": (),
    "flwr-clientapp": (_preload_parties,),
    "flwr-serverapp": (_preload_commands, _preload_parties),
}


def worker(life: int, command: Callable[[], None]) -> None:
    """Run as a long-lived worker process for a party's sessions.

    Args:
        life: file descriptor of a pipe that closes when the party's service ends.
        command: function that runs a vfl command line.
    """
    from vfl.federation import programs, workers

    of_flower = {
        "flower-superexec": programs.superexec,
        "flwr-clientapp": programs.clientapp,
        "flwr-serverapp": programs.serverapp,
    }
    name = os.environ[programs.WORKER_VARIABLE]
    names = ["flower-superexec", name] if name else [*of_flower]
    if not name:  # the terminal's command handles Ctrl-C and passes it on
        os.setsid()

    def preload() -> None:
        for each in names[1:]:
            workers.preload(each)
        for own in (one for each in names for one in _PRELOADS[each]):
            own()

    preloads: list[Callable[[], object]] = [partial(workers.preload, names[0]), preload]
    workers.serve({each: of_flower[each] for each in names} | {"vfl": command}, preloads, life)


def rank() -> None:
    """Run as a further rank of a party; the party's first rank starts it and sends it an order."""
    from vfl.core.seeds import use_one_thread
    from vfl.session.ranks.processes import ordered

    with ordered() as order:
        use_one_thread()
        _play_rank(order)


def hand_over(path: Path) -> None:
    """If the label party's long-lived worker can run this command, end with its exit code."""
    from vfl.federation import workers

    code = workers.hand_over(path, sys.argv[1:])
    if code is not None:
        raise typer.Exit(code)


def project_of(path: Path, settings: Sequence[str]) -> tuple[LabelFolder, Experiment]:
    """Return a project and its experiment for a request to its SuperLink; print warnings.

    If the label party's long-lived worker can run the command, this process ends here.
    """
    hand_over(path)
    from vfl.federation.project import LabelFolder
    from vfl.training.specs import spec_mistakes

    label = LabelFolder.find(path)
    for warning in label.certificate_warnings():
        say(warning)
    return label, label.experiment(settings, spec_mistakes)


def run_among_parties() -> None:
    """If a worker on a party's machine can run this command, end with the worker's exit code."""
    from vfl.federation import programs

    code = programs.shared_worker(sys.argv[1:])
    if code is not None:
        raise typer.Exit(code)


def _follow(
    service: Service, supervise: Callable[[], None], tend: Callable[[], None] | None = None
) -> None:
    """Print vfl's own messages from a service's log, until the service ends by itself.

    Args:
        service: the running service.
        supervise: function that restarts the service's worker if the worker has died.
        tend: function that `_follow` calls every few seconds.
    """
    say(f"its log is {service.log}; end it with Ctrl-C")
    tended = time.monotonic()
    with service.log.open(encoding="utf-8", errors="replace") as log:
        log.seek(0, os.SEEK_END)
        torn = ""
        while service.alive:
            supervise()
            if tend is not None and time.monotonic() - tended > _TEND_EVERY_S:
                tend()
                tended = time.monotonic()
            *lines, torn = (torn + log.read()).split("\n")
            for entry in log_entries(filter(_OURS.match, lines)):
                say(entry)
            time.sleep(_LOOK_EVERY_S)


def _epsilon(entry: Entry) -> str:
    if entry.spent_epsilon is None:
        return "-"
    text = f"at most {entry.spent_epsilon:.4g}: {entry.stated_passes} times {entry.epsilon:.4g}"
    text += f", delta {entry.stated_passes * entry.delta:.2g}" if entry.delta else ""
    queries = entry.passes - entry.stated_passes
    return f"{text}; and {queries} times in queries, which have no epsilon" if queries else text


def _total(entries: Sequence[Entry], others: float, most: float | None, lost: float) -> str:
    """Return a line with the epsilon of all runs, and the epsilon that a restored copy may lack."""
    from vfl.session.store.session_ledger import total_epsilon

    stated = [entry for entry in entries if entry.epsilon is not None]
    text = "all names: epsilon "
    text += f"at most {total_epsilon(stated):.4g}" if stated else "-"
    text += f" and {others:.4g} of other kinds" if others else ""
    text += f" and {lost:.4g} that a restored copy may not contain" if lost else ""
    text += "" if most is None else f" of {most:g} allowed"
    if delta := sum(entry.stated_passes * (entry.delta or 0.0) for entry in stated):
        text += f", delta {delta:.2g}"
    without = len(entries) - len(stated)
    return f"{text}; runs without an epsilon: {without}" if without else text


def _facts(entry: Entry) -> dict[str, Any]:
    """Return an entry of the session ledger for programs, without its nonce, which is secret."""
    facts = entry.model_dump(mode="json", exclude={"nonce", "settings"})
    more = {"passes": entry.passes, "statistics": entry.statistics}
    return facts | more | {"spent_epsilon": entry.spent_epsilon}


def _new_identity(party: PartyFile) -> None:
    from vfl.federation.joining import write_public
    from vfl.session.store.identity import Identity

    private = party.beside(party.identity.key)
    Identity.fresh().keep_at(private)
    public = write_public(party)
    say(f"wrote {private} and {public.file}, fingerprint {public.fingerprint}")
    say(f"give {public.file.name} to every other party, by a channel that the label party does not")
    say(f"control; each runs: vfl party accept {public.file.name} FOLDER --fingerprint TEXT")
