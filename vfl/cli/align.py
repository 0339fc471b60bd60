"""``vfl align``: the rows that all parties have, by private set intersection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import Json, Set, emit
from vfl.core.ledger import size


def align(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="EXPERIMENT.toml", help="An experiment whose parties have their own files."
        ),
    ],
    settings: Set = None,
    protocol: Annotated[
        str, typer.Option(help="How common ids are found: ecdh or server_aided, :pad=IDS.")
    ] = "ecdh",
    preview: Annotated[
        bool, typer.Option("--preview", help="Count what each id rule would gain; keep nothing.")
    ] = False,
    rules: Annotated[
        str | None, typer.Option(help="Id rules to preview; all of them if not given.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the rows that all parties have, without showing ids.

    Every party is played in this process, from its own file. What is kept are positions, in the
    folder that `data.alignment` names; training and predicting then take these rows. A version is
    used again until a table has other ids.
    """
    from vfl.config import read_experiment
    from vfl.datasets.alignment.ids import PREVIEW
    from vfl.training import alignment

    experiment = read_experiment(path, settings or [])
    if preview:
        gains = alignment.preview(experiment, protocol, rules or PREVIEW)
        if json:
            emit([vars(gain) for gain in gains])
            return
        print(f"{'rules':<40}{'common':>10}{'gained':>10}  ids changed, repeated")
        for gain in gains:
            own = ", ".join(
                f"{party} {changed}, {gain.repeated[party]}"
                for party, changed in gain.changed.items()
            )
            print(f"{gain.rules:<40}{gain.common:>10}{gain.gained:>+10}  {own}")
        return
    folder = Path(experiment.data.alignment or path.resolve().parent / alignment.NAME)
    done = alignment.align(experiment, protocol, folder)
    sent = {party: done.traffic.of(party) if done.traffic else 0 for party in done.ids}
    if json:
        facts = {"common": done.common, "ids": done.ids, "versions": done.versions}
        emit(facts | {"reused": done.reused, "bytes": sent, "folder": str(folder)})
        return
    print(f"{'common rows':<16} {done.common}")
    for party, count in done.ids.items():
        told = "used again" if done.reused else f"{size(sent[party])} sent and received"
        print(f"{party:<16} {count} ids, version {done.versions[party]}, {told}")
    print(f"{'positions':<16} {folder}")
    if experiment.data.alignment is None:
        print(f"{'then':<16} vfl train {path} -s data.alignment={folder}")
