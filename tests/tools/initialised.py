"""A project as `vfl init` writes it, with ports that tests do not share."""

import sys
import warnings

import pytest
from ports import free_ports

from vfl.federation.project import LabelFolder

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from vfl.cli import main


def initialise(project, nodes, *words):
    """Run `vfl init` and change the ports alone.

    Args:
        project: the new folder.
        nodes: parties with a SuperNode, in the order in which it numbers them.
        words: further arguments of `vfl init`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vfl", "init", str(project), *words])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    port, stream, *ports = free_ports(2 + len(nodes))
    app = project / "label" / "app" / "experiment.toml"
    text = app.read_text().replace(":8000", f":{port}").replace("= 8001", f"= {stream}")
    app.write_text(text.replace("join_timeout_s = 60.0", "join_timeout_s = 90.0"))
    for number, party in enumerate(nodes):
        file = project / party / "party.toml"
        text = file.read_text().replace(":8000", f":{port}")
        file.write_text(text.replace(f"= {9094 + number}", f"= {ports[number]}"))
    return LabelFolder.find(project)
