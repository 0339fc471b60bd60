"""``vfl serve``: answer requests over HTTP with a trained run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Run, say

_END_S = 30.0


def _option(what: str, default: str | None = None) -> Any:
    """An option in place of a setting of `[serve]`; `default` is that of the setting."""
    return typer.Option(help=what, show_default=False if default is None else default)


def serve(
    run: Run,
    host: Annotated[str | None, _option("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 takes a free one.", "8080")] = None,
    token: Annotated[
        Path | None,
        _option("File with the clients' token; RUN/serve.token without it."),
    ] = None,
    certificate: Annotated[Path | None, _option("Certificate for TLS, PEM.")] = None,
    key: Annotated[Path | None, _option("Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None,
        _option("Authority that signed every client's certificate, PEM."),
    ] = None,
    wait_ms: Annotated[
        float | None, _option("How long a batch waits for more requests.", "0.0")
    ] = None,
    timeout_s: Annotated[float | None, _option("Most time for one request.", "5.0")] = None,
    max_ids: Annotated[int | None, _option("Most rows of one request.", "256")] = None,
    max_requests_per_second: Annotated[float | None, _option("Of one token.", "10000.0")] = None,
    max_rows_per_day: Annotated[
        str | None,
        _option("Of one token, in a day of UTC; off is no limit.", "100000"),
    ] = None,
    probability_decimals: Annotated[
        str | None,
        _option("To which probabilities are rounded; off tells them whole.", "3"),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="A proxy whose last X-Forwarded-For says who asks. Repeat."
        ),
    ] = None,
    explain: Annotated[
        bool | None,
        _option("Tell what each party contributed, if asked.", "False"),
    ] = None,
    partial: Annotated[
        bool | None,
        _option("Let boosted trees answer without a feature party that is away.", "False"),
    ] = None,
    switch: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER", help="Have the service that began with RUN go on with this run."
        ),
    ] = None,
    cache_rows: Annotated[int | None, _option("Answers kept in memory; 0 keeps none.", "0")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="PARTY",
            help="A further label party that answers its own clients meanwhile.",
        ),
    ] = None,
) -> None:
    """Serve a run's predictions over HTTP until it is interrupted.

    RUN is the folder that `vfl train` printed. On a federation the feature parties answer from
    their own SuperNodes, for the rows of the file that each names in its own `data.predict`; in
    process, for the test rows of the experiment. `--switch OTHER` has a service that runs already
    go on with another run; with RUN itself it goes back. What no option says, `[serve]` of the
    label party's own file says. A party of `--task` listens at the address
    in the `[serve]` of its own file; in process its task is served in place of the first one's.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.serving import front

    if switch is not None:
        front.switch(RunFolder.open(run).path, RunFolder.open(switch).path)
        return
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
        from vfl.config import read_party_file
        from vfl.training import federated

        label = read_party_file(federated.label_folder_of(folder.path).party_file)
        front.settings_file(folder.path, front.settings_of(label, given))
        _on_the_federation(folder.path)
        return
    from vfl.core.seeds import use_one_thread
    from vfl.serving.local import serve as serve_here

    use_one_thread()
    serve_here(folder.path, front.settings_of(None, given), lambda begun: say(begun.welcome))


def _on_the_federation(run: Path) -> None:
    """Submit the session and follow it; an interrupt ends it in good order."""
    hand_over(run)
    from vfl.serving.front import STOP_FILE
    from vfl.training import federated

    label, name = federated.label_folder_of(run), run.resolve().name
    say(f"submitting run {name} to serve; end it with Ctrl-C")
    try:
        federated.run_session(label, "serve", name, on_note=say)
    except (KeyboardInterrupt, SystemExit):
        say("ending the service")
        (run / STOP_FILE).touch(mode=0o600)
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            if any((run / each).exists() for each in ("served.json", "failure.json")):
                return
            time.sleep(0.2)
        say("it has not ended yet; it does once nobody is waited for")
