"""A feature party is killed in the middle of a training that protects something, and comes back.

The training goes on from the last checkpoint with new keys and masks. Bit for bit it ends where the
same training ends undisturbed, if what protects it leaves no trace in the weights; truncations of
shares do.
"""

from contextlib import ExitStack

import process_table
import pytest

from vfl.config import read_party_file
from vfl.config.run_folder import RunFolder
from vfl.core.storage import read_json
from vfl.federation import deployment
from vfl.training import demo, federated
from vfl.training.demo import run_in_process

pytestmark = pytest.mark.net

PLAIN_SGD = ["train.optimizer=sgd", "train.momentum=0", "train.weight_decay=0"]
LINEAR = [f"parties.{name}.bottom=mlp:hidden=none" for name in ("left", "right")]
WHOLE = [f"parties.{name}.bottom=identity" for name in ("left", "right")]
#: Settings of each mode, and how far its accuracy may be from that of a training nobody disturbed.
MODES = {
    "sum": (["merge=sum", "secure=sum"], 0.0),
    "beaver": (
        ["merge=sum", "secure=beaver", "train.learning_rate=0.3", *PLAIN_SGD, *LINEAR],
        0.005,
    ),
    "permuted": (
        ["secure=permuted:mode=fast", "merge=concat", "data.validation=0",
         "train.learning_rate=0.5", "label.top=mlp:hidden=16", *PLAIN_SGD, *WHOLE],
        0.005,
    ),
    "dp": (["dp.noise=1", "dp.epsilon=20"], 0.0),
    "dp and sum": (["dp.noise=1", "dp.epsilon=20", "merge=sum", "secure=sum"], 0.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The demo's project with everything running, whose processes can be told from others."""
    folder = tmp_path_factory.mktemp("lost") / "project"
    label = demo.write_demo(folder, ["federation.join_timeout_s=90.0"])
    with ExitStack() as services:
        environment = services.enter_context(pytest.MonkeyPatch.context())
        environment.setenv(process_table.MARK, str(folder))
        services.callback(deployment.start_superlink(label).stop)
        deployment.register_nodes(label)
        for side in ("left", "right"):
            file = folder / side / "party.toml"
            services.callback(deployment.start_supernode(read_party_file(file), file).stop)
        yield folder, label


@pytest.mark.parametrize("mode", MODES)
def test_a_training_goes_on_when_its_lost_party_is_back(marked, mode):
    folder, label = marked
    settings, apart = MODES[mode]
    name = f"lost-{mode.replace(' ', '-')}"
    overrides = [f"name={name}", *settings, "train.epochs=16", "federation.max_restarts=1",
                 "federation.rejoin_window_s=2.0"]  # fmt: skip
    killed, notes = [], []

    def kill(record):
        if not killed and record["epoch"] >= 3:
            killed.append(record["epoch"])
            process_table.kill(folder, "flwr-clientapp", "right")

    path = federated.run_session(
        label, "train", name, overrides=overrides, on_epoch=kill, on_note=notes.append
    )
    assert killed
    assert "party 'right' disconnected and did not reconnect; restart 1 of 1" in "\n".join(notes)
    found = RunFolder.open(path).summary()
    same = read_json(run_in_process(folder, label, lambda _: None, overrides) / "summary.json")
    assert found["epochs"] == same["epochs"]
    assert found["test_accuracy"] == pytest.approx(same["test_accuracy"], abs=apart)
    if not apart:
        assert found["weights_sha256"] == same["weights_sha256"]
    assert found.get("privacy") == same.get("privacy")
