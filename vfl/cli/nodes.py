"""``vfl superlink`` and ``vfl supernode``: Flower's two services, one command line a party."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vfl.cli.output import say


def superlink(
    project: Annotated[
        Path, typer.Argument(metavar="PROJECT", help="The project, or its label folder.")
    ] = Path(),
) -> None:
    """Run the label party's SuperLink until it is interrupted; registers the parties' keys.

    PROJECT is the folder that `vfl init` wrote, or the label folder in it.
    """
    from vfl import deployment
    from vfl.project import LabelFolder

    label = LabelFolder.find(project)
    service = deployment.start_superlink(label)
    try:
        new = deployment.register_nodes(label)
        address = label.experiment().federation.superlink
        say(f"the SuperLink listens on {address}; new keys: {', '.join(new) or 'none'}")
        say(f"its log is {service.log}; end it with Ctrl-C")
        service.wait()
    finally:
        service.stop()


def supernode(
    party_file: Annotated[Path, typer.Argument(metavar="party.toml", help="The party's own file.")],
) -> None:
    """Run a feature party's SuperNode until it is interrupted."""
    from vfl import deployment
    from vfl.config import read_party_file

    party = read_party_file(party_file)
    service = deployment.start_supernode(party, party_file)
    try:
        say(f"party {party.party} is connected to {party.node.superlink}")
        say(f"its log is {service.log}; end it with Ctrl-C")
        service.wait()
    finally:
        service.stop()
