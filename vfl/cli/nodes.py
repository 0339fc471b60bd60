"""``vfl superlink`` and ``vfl supernode``: Flower's two services, one command line a party."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import say
from vfl.errors import LostPeerError

if TYPE_CHECKING:
    from vfl.service import Service

_LOOK_EVERY_S = 0.2
_OURS = re.compile(r"vfl: |error\[V|  (where|got  |want |try  |more ) ")


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
    for warning in label.certificate_warnings():
        say(warning)
    say("starting the SuperLink")
    service = deployment.start_superlink(label)
    try:
        new = deployment.register_nodes(label)
        address = label.experiment().federation.superlink
        say(f"the SuperLink listens on {address}; new keys: {', '.join(new) or 'none'}")
        _follow(service)
        raise LostPeerError(
            f"{service.name} ended",
            got=f"exit {service.wait()}",
            fix=f"look at {service.log}, start it again, then vfl train PROJECT --resume RUN",
        )
    finally:
        service.stop()


def supernode(
    party_file: Annotated[Path, typer.Argument(metavar="party.toml", help="The party's own file.")],
) -> None:
    """Run a feature party's SuperNode until it is interrupted; tells of each session.

    One that ends by itself is started again; what waiting does not mend ends the command.
    """
    from vfl import deployment
    from vfl.config import read_party_file
    from vfl.supervise import supervise
    from vfl.transport import expiry_warning

    party = read_party_file(party_file)
    ca = party.beside(party.node.ca)
    if ca.exists() and (warning := expiry_warning(ca, "ask the label party for its new ca.pem")):
        say(warning)

    def start() -> Service:
        say(f"connecting party {party.party} to {party.node.superlink}")
        service = deployment.start_supernode(party, party_file)
        say(f"party {party.party} is connected to {party.node.superlink}")
        return service

    supervise(start, _follow, say)


def _follow(service: Service) -> None:
    """Repeat what vfl itself says in a service's log, until the service ends by itself."""
    say(f"its log is {service.log}; end it with Ctrl-C")
    with service.log.open(errors="replace") as log:
        log.seek(0, os.SEEK_END)
        torn = ""
        while service.alive:
            *lines, torn = (torn + log.read()).split("\n")
            for line in filter(_OURS.match, lines):
                say(line)
            time.sleep(_LOOK_EVERY_S)
