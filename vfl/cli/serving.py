"""``vfl serve``: answer requests over HTTP with a trained run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.federation import hand_over
from vfl.cli.output import Run, say

_END_S = 30.0


def serve(
    run: Run,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    token: Annotated[
        Path | None, typer.Option(help="File with the clients' token; RUN/serve.token without it.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate for TLS, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Authority that signed every client's certificate, PEM.")
    ] = None,
    wait_ms: Annotated[float, typer.Option(help="How long a batch waits for more requests.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(help="Most time for one request.")] = 5.0,
    max_ids: Annotated[int, typer.Option(help="Most rows of one request.")] = 256,
    max_requests_per_second: Annotated[float, typer.Option(help="Of one token.")] = 10_000.0,
    max_rows_per_day: Annotated[
        str, typer.Option(help="Of one token, in a day of UTC; off is no limit.")
    ] = "100000",
    probability_decimals: Annotated[
        str, typer.Option(help="To which probabilities are rounded; off tells them whole.")
    ] = "3",
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="A proxy whose last X-Forwarded-For says who asks. Repeat."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what each party contributed, if asked.")
    ] = False,
    switch: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER", help="Have the service that began with RUN go on with this run."
        ),
    ] = None,
    cache_rows: Annotated[int, typer.Option(help="Answers kept in memory; 0 keeps none.")] = 0,
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
    go on with another run; with RUN itself it goes back. A party of `--task` listens at the address
    in the `[serve]` of its own file; in process its task is served in place of the first one's.
    """
    from vfl.config.run_folder import RunFolder
    from vfl.config.toml import check
    from vfl.serving import front
    from vfl.serving.front import LeadSettings, settings_file

    if switch is not None:
        front.switch(RunFolder.open(run).path, RunFolder.open(switch).path)
        return
    if (certificate is None) is not (key is None):
        raise typer.BadParameter("--certificate and --key belong together")
    if client_ca is not None and certificate is None:
        raise typer.BadParameter("clients' certificates need --certificate and --key")

    def path(given: Path | None) -> str | None:
        return None if given is None else str(given.resolve())

    settings = check(
        {
            "host": host,
            "port": port,
            "token": path(token),
            "certificate": path(certificate),
            "key": path(key),
            "client_ca": path(client_ca),
            "wait_ms": wait_ms,
            "timeout_s": timeout_s,
            "max_ids": max_ids,
            "max_requests_per_second": max_requests_per_second,
            "max_rows_per_day": max_rows_per_day,
            "probability_decimals": probability_decimals,
            "trusted_proxy": trusted_proxy or (),
            "explain": explain,
            "cache_rows": cache_rows,
            "tasks": tuple(tasks or ()),
        },
        LeadSettings,
        "the options",
    )
    folder = RunFolder.open(run)
    if folder.mode == "federated":
        settings_file(folder.path, settings)
        _on_the_federation(folder.path)
        return
    from vfl.core.seeds import use_one_thread
    from vfl.serving.local import serve as serve_here

    use_one_thread()
    serve_here(folder.path, settings, lambda begun: say(begun.welcome))


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
