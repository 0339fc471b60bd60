"""``vfl serve``, ``clients``, ``promote``, ``rollback``: serve runs over HTTP, manage clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Json, Run, argument, emit, option, print_line, say, served_run
from vfl.core.errors import UserError
from vfl.core.processes import looks
from vfl.core.storage import write_text

if TYPE_CHECKING:
    from vfl.serving.clients import Budgets, Caller, Clients

_END_S = 30.0


Served = Annotated[
    Path,
    argument(
        "The folder that vfl train printed, or a project for its promoted or last run.",
        "RUN|PROJECT",
        callback=served_run,
    ),
]


def _option(what: str, default: str | None = None) -> Any:
    """Declare an option for a setting of `[serve]`; `default` is the setting's default."""
    return typer.Option(help=what, show_default=False if default is None else default)


def serve(
    run: Served,
    host: Annotated[str | None, _option("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 takes a free one.", "8080")] = None,
    token: Annotated[
        Path | None,
        _option("File with the clients' tokens, one per line; by default RUN/serve.token."),
    ] = None,
    certificate: Annotated[Path | None, _option("Certificate for TLS, PEM.")] = None,
    key: Annotated[Path | None, _option("Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None,
        _option("PEM file of the authority that must have signed every client's certificate."),
    ] = None,
    wait_ms: Annotated[
        float | None, _option("Time that a batch waits for further requests.", "0.0")
    ] = None,
    timeout_s: Annotated[float | None, _option("Time limit of a request.", "5.0")] = None,
    max_ids: Annotated[int | None, _option("Rows of one request.", "256")] = None,
    max_requests_per_second: Annotated[
        float | None, _option("Largest number of requests per second with one token.", "10000.0")
    ] = None,
    max_rows_per_day: Annotated[
        str | None,
        _option("Largest number of rows per UTC day with one token; off sets no limit.", "100000"),
    ] = None,
    probability_decimals: Annotated[
        str | None,
        _option("Decimals of probabilities; off does not round.", "3"),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        option(
            "A trusted proxy, whose last X-Forwarded-For entry identifies the client. Repeat.",
            "ADDRESS",
        ),
    ] = None,
    explain: Annotated[
        bool | None,
        _option("Include each party's contribution in answers, if a client requests it.", "False"),
    ] = None,
    partial: Annotated[
        bool | None,
        _option("Let boosted trees answer without an absent feature party.", "False"),
    ] = None,
    cache_rows: Annotated[
        int | None, _option("Number of cached answers; 0 disables the cache.", "0")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        option(
            "An additional label party that answers its own clients at the same time.",
            "PARTY",
            "--task",
        ),
    ] = None,
) -> None:
    """Serve a run's predictions over HTTP, until the command is interrupted.

    RUN is the folder that `vfl train` printed. In a federation the feature parties answer from
    their SuperNodes, for rows of each party's table: `data.predict`, or else `data.source`. In one
    process, the rows are the test rows of the experiment. `vfl promote OTHER` switches a running
    service to another run. Options of the command override `[serve]` in the label party's own file,
    or the defaults in one process. A label party that --task names listens at the address in
    `[serve]` of its own party file; in one process, its task is served instead of the leading
    party's task.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.serving import front

    files = {"token": token, "certificate": certificate, "key": key, "client_ca": client_ca}
    options: dict[str, Any] = {
        each: None if path is None else str(path.resolve()) for each, path in files.items()
    }
    options |= {
        "host": host,
        "port": port,
        "wait_ms": wait_ms,
        "timeout_s": timeout_s,
        "max_ids": max_ids,
        "max_requests_per_second": max_requests_per_second,
        "max_rows_per_day": max_rows_per_day,
        "probability_decimals": probability_decimals,
        "trusted_proxy": trusted_proxy or None,
        "explain": explain,
        "cache_rows": cache_rows,
        "partial": partial,
        "tasks": tasks or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    folder = RunFolder.open(run)
    if folder.mode == "federated":
        from vfl.training import federated

        label = federated.label_folder_of(folder.path).party()
        front.settings_file(folder.path, front.settings_of(label, given))
        _on_the_federation(folder.path)
        return
    from vfl.core.seeds import use_one_thread
    from vfl.serving.local import serve as serve_here

    use_one_thread()
    serve_here(folder.path, front.settings_of(None, given), lambda begun: say(begun.welcome))


def clients(
    path: Annotated[
        Path,
        argument(
            "A run, a project, or a label party's own file, whose clients are managed.",
            "RUN|PROJECT|party.toml",
        ),
    ],
    add: Annotated[str | None, option("Add a client, and print its token once.", "NAME")] = None,
    remove: Annotated[str | None, option("Revoke a client's token.", "NAME")] = None,
    rows: Annotated[
        int | None,
        _option("For a new client: largest number of rows per UTC day.", "limit of the service"),
    ] = None,
    requests: Annotated[
        int | None, _option("For a new client: largest number of requests per UTC day.", "no limit")
    ] = None,
    days: Annotated[
        float | None, _option("For a new client: days until the token expires.", "never")
    ] = None,
    out: Annotated[
        Path | None, option("Write the token to this file, readable only by its owner.", "FILE")
    ] = None,
    json: Json = False,
) -> None:
    """List the clients of a label party's services, add a client, or remove one.

    Each client has a token, of which vfl stores only a digest. All services of a project use the
    same list of clients, and count a client's rows and requests together; a running service applies
    a change within two seconds. A run that one process trained has a list of its own.
    """
    known, budgets = _clients_of(path)
    if remove is not None:
        known.remove(remove)
        say(f"removed client {remove}")
    if add is not None:
        if out is not None and out.exists():
            raise UserError("this file exists already", where=str(out), fix="name another one")
        token = known.add(add, rows=rows, requests=requests, days=days)
        if out is None:
            print(token)
            say(f"this is the token of client {add}; it is shown once")
        else:
            write_text(out, token + "\n")
            say(f"wrote the token of client {add} to {out}")
    if add is None and remove is None:
        _list_clients(known.entries(), budgets().spent(), json)


def _list_clients(
    clients: Sequence[Caller], spent: Mapping[str, Sequence[int]], json: bool
) -> None:
    facts = [
        each.model_dump(mode="json", exclude={"digest"})
        | dict(zip(("rows_today", "requests_today"), spent.get(each.name, (0, 0)), strict=True))
        for each in clients
    ]
    if json:
        emit(facts)
        return
    for each, client in zip(facts, clients, strict=True):
        print_line(client.name, client.until, 20)
        for what in ("rows", "requests"):
            most = each[f"max_{what}_per_day"]
            limit = "limit of the service" if what == "rows" else "no limit"
            told = limit if most is None else f"{most} a day"
            print(f"  {what:<18} at most {each[f'{what}_today']} used today; {told}")
    if not facts:
        print("no client; vfl clients PATH --add NAME makes one")


def _clients_of(path: Path) -> tuple[Clients, Callable[[], Budgets]]:
    """Return the list of a label party's clients, and a function that reads their counts."""
    from vfl.config import read_party_file
    from vfl.config.run_folder import RunFolder
    from vfl.federation.project import LabelFolder
    from vfl.serving.clients import FOLDER, Budgets, Clients
    from vfl.training.federated import label_folder_of

    if not path.is_dir():
        party = read_party_file(path)
    elif not (path / "run.json").exists():
        party = LabelFolder.find(path).party()
    else:
        run = RunFolder.open(path)
        if run.mode != "federated":
            folder, owner = run.path / FOLDER, run.experiment().label.party
            return Clients(folder, owner), partial(Budgets, folder, owner, None)
        party = label_folder_of(run.path).party()
    known = Clients(party.store_path / FOLDER, party.party)
    return known, partial(Budgets.of_party, party, None)


def promote(run: Run, json: Json = False) -> None:
    """Switch running services to a run without interruption; later services also use it.

    A running service of the project or folder prepares the run while the current run still answers,
    and switches when the new run can answer. If the new run cannot answer, the service keeps the
    current run. `vfl rollback` returns to the run that was promoted before this run.
    """
    from vfl.training.promotion import promote as promoted

    run = run.resolve()
    _say_promoted(run, [service.address for service in promoted(run)], json)


def rollback(
    path: Annotated[
        Path, argument("A project, or the folder of its runs.", "PROJECT|FOLDER")
    ] = Path(),
    json: Json = False,
) -> None:
    """Switch services back to the run that was promoted before the current one."""
    from vfl.training.promotion import roll_back, runs_of

    run, services = roll_back(runs_of(path))
    _say_promoted(run, [service.address for service in services], json)


def _say_promoted(run: Path, addresses: list[str], json: bool) -> None:
    if json:
        emit({"promoted": str(run), "services": addresses})
        return
    print_line("promoted", run)
    for address in addresses:
        print_line("answers at", address)
    if not addresses:
        print(f"no service is running; start one with: vfl serve {run}")


def _on_the_federation(run: Path) -> None:
    """Submit a serving session and print its notes; after an interrupt, end in order."""
    hand_over(run)
    from vfl.config.run_folder import failure_of
    from vfl.training import federated
    from vfl.training.promotion import STOP_FILE

    label, name = federated.label_folder_of(run), run.resolve().name
    say(f"submitting run {name} to serve; end it with Ctrl-C")
    try:
        federated.run_session(label, "serve", name, on_note=say)
    except (KeyboardInterrupt, SystemExit):
        say("ending the service")
        (run / STOP_FILE).touch(mode=0o600)
        for _ in looks(_END_S):
            if (run / "served.json").exists() or failure_of(run, "serve").exists():
                return
        say("the service has not ended yet; it ends after all waiting requests")
