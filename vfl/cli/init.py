"""``vfl init``: a project folder to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vfl.cli.output import say


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    party: Annotated[list[str], typer.Option(help="A feature party; give it once for each.")],
    label_party: Annotated[str, typer.Option(help="The party with the labels.")] = "label",
    dealer: Annotated[
        str, typer.Option(help="A party without data that deals, for shared first layers.")
    ] = "",
    host: Annotated[
        str, typer.Option(help="Name or address the label party is reached by.")
    ] = "127.0.0.1",
) -> None:
    """Write a project: experiment, Flower app, trial certificates and keys, a file a party.

    FOLDER is a new one. Its README.md tells each party's command.
    """
    from vfl.config import Experiment, PartyFile
    from vfl.config.toml import check
    from vfl.project import write_project

    port, stream_port, api_port = 8000, 8001, 9094
    experiment = check(
        {
            "name": folder.resolve().name,
            **(_shared(party, dealer) if dealer else {"parties": {name: {} for name in party}}),
            "label": {"party": label_party},
            "federation": {
                "superlink": f"{host}:{port}",
                "stream_host": host,
                "stream_port": stream_port,
            },
        },
        Experiment,
        where="the arguments",
    )
    own = {
        name: {
            "party": name,
            "data": {"source": "data.csv", "id": "id"},
            "node": {"superlink": f"{host}:{port}", "api_port": api_port + position},
        }
        for position, name in enumerate(party)
    }
    if dealer:
        node = {"superlink": f"{host}:{port}", "api_port": api_port + len(party)}
        own[dealer] = {"party": dealer, "role": "dealer", "node": node}
    own[label_party] = {
        "party": label_party,
        "data": {"source": "data.csv", "id": "id", "label": "label"},
    }
    files = {
        name: check(content, PartyFile, where="the arguments") for name, content in own.items()
    }
    write_project(folder, experiment, files, host)
    say(f"wrote {folder}; {folder / 'README.md'} has each party's command")


def _shared(parties: list[str], dealer: str) -> dict[str, Any]:
    """Settings of an experiment in which a third party deals; see docs/secure_layer.md."""
    return {
        "merge": "sum",
        "secure": f"beaver:dealer={dealer}",
        "parties": {name: {"bottom": "mlp:hidden=none"} for name in parties},
        "train": {"optimizer": "sgd", "momentum": 0, "learning_rate": 0.1},
    }
