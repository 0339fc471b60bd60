"""One real deployment for all tests of this folder: SuperLink, two SuperNodes, TLS, keys."""

from contextlib import ExitStack

import pytest

from vfl import demo, deployment
from vfl.config import read_party_file


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """The demo's project, three epochs long; `folder` and the label party's folder in it."""
    folder = tmp_path_factory.mktemp("federation") / "project"
    label = demo.write_demo(folder, ["train.epochs=3", "federation.join_timeout_s=90.0"])
    return folder, label


@pytest.fixture(scope="session")
def deployed(project):
    """The project with everything running; ended afterwards by process id."""
    folder, label = project
    with ExitStack() as services:
        superlink = deployment.start_superlink(label)
        services.callback(superlink.stop)
        assert deployment.register_nodes(label) == ["left", "right"]
        for side in ("left", "right"):
            file = folder / side / "party.toml"
            node = deployment.start_supernode(read_party_file(file), file)
            services.callback(node.stop)
        yield folder, label
        assert superlink.alive
