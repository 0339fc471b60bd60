"""Real deployments for the tests of this folder: SuperLink, two SuperNodes, TLS, keys."""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_deployment import Deployment, results

from vfl.config import read_party_file
from vfl.federation import deployment
from vfl.training import demo

#: Long enough to do something to it, with a few checkpoints before and after.
LONG = ("train.epochs=60", "train.batch_size=32", "train.checkpoint_every=200")


@pytest.fixture(scope="session")
def services():
    """The demo's project, three epochs long, with everything running: one for all tests.

    Its folder, the label party's folder in it, and the SuperLink.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as services:
        os.chmod(name, 0o755)  # other users may come as far as the project itself lets them
        folder = Path(name) / "project"
        label = demo.write_demo(folder, ["train.epochs=3", "federation.join_timeout_s=90.0"])
        superlink = deployment.start_superlink(label)
        services.callback(superlink.stop)
        assert deployment.register_nodes(label) == ["left", "right"]
        for side in ("left", "right"):
            file = folder / side / "party.toml"
            node = deployment.start_supernode(read_party_file(file), file)
            services.callback(node.stop)
        yield folder, label, superlink
        assert superlink.alive


@pytest.fixture
def deployed(services):
    """The project's folder, and the label party's."""
    return services[:2]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A long training's project with every party's own command running, for faults."""
    started = Deployment(tmp_path_factory.mktemp("faults") / "project", *LONG)
    try:
        yield started.start()
    finally:
        started.close()


@pytest.fixture(scope="module")
def undisturbed(commands):
    """What that training gives when nothing happens, in one process."""
    return results(demo.run_in_process(commands.folder, commands.label, lambda record: None))


@pytest.fixture
def measured(capsys):
    """Prints how long something took since it was called last, past the capture."""
    started = time.monotonic()

    def tell(what=None):
        nonlocal started
        if what is not None:
            with capsys.disabled():
                print(f"\n{what}: {time.monotonic() - started:.0f} s", flush=True)
        started = time.monotonic()

    return tell
