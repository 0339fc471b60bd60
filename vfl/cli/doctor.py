"""``vfl doctor``: what could keep this machine or party from working."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Json, emit


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROJECT|party.toml",
            help="A project, or a party's own file; without one, the machine alone.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Look for what could go wrong: one line a check, OK, WARN or FAIL, and what to do.

    Versions, cores and disk; with PROJECT or party.toml also files, keys, certificates, ports, the
    way to the SuperLink, and the clock. It changes nothing and contacts only the addresses in the
    given files. Exit code 2 if anything is FAIL.
    """
    from dataclasses import asdict

    from vfl.doctor import examine

    checks = []
    for check in examine(path):
        checks.append(check)
        if not json:
            print(f"{check.state:<4}  {check.name:<15} {check.found}")
            if check.fix and check.state != "OK":
                print(f"{'':<22}try {check.fix}")
    failed = sum(check.state == "FAIL" for check in checks)
    if json:
        emit({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        print(f"{failed} of {len(checks)} checks failed" if failed else "nothing is wrong")
    if failed:
        raise typer.Exit(2)
