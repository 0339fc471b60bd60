"""Three commands in three folders, each with its own table: what three organisations start."""

import json
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
from sealed import weights_at

from vfl.config import read_experiment
from vfl.core.storage import read_json, read_lines
from vfl.mpc.ring import decode
from vfl.training.run import load_data
from vfl.triple.door import Door

pytestmark = pytest.mark.net
NAMES = ("P0", "P1", "P2")
EXPERIMENT = """
name = "loans"
[data]
source = "lender.csv"
id = "customer"
[parties.bank]
source = "bank.csv"
[parties.shop]
source = "shop.csv"
[label]
party = "lender"
column = "repaid"
[train]
epochs = {epochs}
batch_rows = 32
"""


@pytest.fixture
def places(tmp_path):
    """A folder each, with the experiment and a table of its own; and all in one."""
    draw = np.random.default_rng(0)
    cells = draw.normal(size=(200, 5))
    ids = [f"c{number:03d}" for number in range(200)]
    tables = {
        "bank": pd.DataFrame(cells[:, :3], columns=list("abc")),
        "shop": pd.DataFrame(cells[:, 3:], columns=list("de")),
        "lender": pd.DataFrame({"repaid": np.where(cells.sum(1) > 0, "yes", "no")}),
    }
    for name, table in tables.items():
        table.insert(0, "customer", ids)
        for folder in (tmp_path / name, tmp_path / "all"):
            folder.mkdir(exist_ok=True)
            table.sample(frac=1, random_state=1).to_csv(folder / f"{name}.csv", index=False)
    return tmp_path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Three:
    """The commands of P0, P1 and P2, which have invited each other."""

    def __init__(self, root, epochs=2):
        self.commands = []
        self.folders = [root / name for name in ("bank", "shop", "lender")]
        for folder in self.folders:
            (folder / "experiment.toml").write_text(EXPERIMENT.format(epochs=epochs))
        for role in (0, 2):
            door = Door.fresh(role, "127.0.0.1", free_port())
            for path in door.keep_in(self.folders[role] / "door")[1:]:
                path.rename(self.folders[NAMES.index(path.stem[-2:])] / path.name)

    def start(self, *words, odd=None, more=()):
        ways = (
            ("--door", "door", "--invitation", "P2-for-P0.json"),
            ("--invitation", "P2-for-P1.json", "--invitation", "P0-for-P1.json"),
            ("--door", "door"),
        )
        self._lines = [
            [
                *(sys.executable, "-m", "vfl", "mpc", "party", "experiment.toml"),
                *("--as", NAMES[role], "--json", *ways[role], *words),
                *(more if role == odd else ()),
            ]
            for role in range(3)
        ]
        self.commands = [self._one(role) for role in range(3)]
        return self

    def restart(self, role):
        """End a party by its own number, and start it again with the same files and words."""
        with self.commands[role] as command:
            command.kill()
        self.commands[role] = self._one(role)

    def _one(self, role):
        return subprocess.Popen(
            self._lines[role],
            cwd=self.folders[role],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s=300):
        found = [command.communicate(timeout=timeout_s) for command in self.commands]
        return [command.returncode for command in self.commands], found


@pytest.fixture
def three(places):
    made = []

    def make(**options):
        made.append(Three(places, **options))
        return made[-1]

    yield make
    for each in made:
        for command in each.commands:
            with command:
                command.kill()


def test_three_organisations_train_and_ask(three, places):
    parties = three()
    codes, found = parties.start("--out", "run", "--hidden", "4").end()
    assert codes == [0, 0, 0], [error for _, error in found]
    cards = [json.loads(out) for out, _ in found]
    assert len({card["plan"]["training"] for card in cards}) == 1
    assert [len(card["history"]) for card in cards] == [0, 0, 1]
    assert {row["sender"] for row in cards[1]["traffic"]} == {"P1"}
    for role, folder in enumerate(parties.folders):
        kept = {path.name for path in (folder / "run").iterdir()}
        holds = {"share.safetensors", "encoder.json"} if role < 2 else set()
        assert kept == {"party.json", "mpc.json"} | holds
        assert read_json(folder / "run" / "mpc.json")["leakage"] == cards[role]["leakage"]
    codes, found = parties.start("--ask", "run").end()
    assert codes == [0, 0, 0], [error for _, error in found]
    assert json.loads(found[2][0])["test_accuracy"] == cards[2]["test_accuracy"]
    for role, folder in enumerate(parties.folders):
        (asked,) = read_lines(folder / "run" / "asked.jsonl")
        assert asked["leakage"] == json.loads(found[role][0])["leakage"]
    assert in_clear(parties.folders, places / "all") == pytest.approx(cards[2]["test_accuracy"])


def test_three_organisations_predict_new_rows(three, places):
    parties = three()
    codes, found = parties.start("--out", "run").end()
    assert codes == [0, 0, 0], [error for _, error in found]
    for folder in parties.folders:
        rows = pd.read_csv(folder / f"{folder.name}.csv").drop(columns="repaid", errors="ignore")
        rows[:30].sort_values("customer").iloc[::-1].to_csv(folder / "new.csv", index=False)
    chosen = sorted(pd.read_csv(parties.folders[0] / "new.csv")["customer"])
    codes, found = parties.start("--ask", "run", "--rows", "new.csv").end()
    assert codes == [0, 0, 0], [error for _, error in found]
    told = pd.read_csv(parties.folders[2] / "run" / "predictions.csv")
    assert list(told["id"]) == chosen
    assert not (parties.folders[0] / "run" / "predictions.csv").exists()
    known = pd.read_csv(places / "all" / "lender.csv").set_index("customer")["repaid"]
    assert (told["prediction"].to_numpy() == known[chosen].to_numpy()).mean() > 0.8


def test_one_party_asks_for_figures_and_another_for_predictions(three):
    parties = three()
    parties.start("--out", "run").end()
    for name in ("bank", "shop", "lender"):
        folder = parties.folders[("bank", "shop", "lender").index(name)]
        pd.read_csv(folder / f"{name}.csv").to_csv(folder / "new.csv", index=False)
    codes, found = parties.start("--ask", "run", odd=1, more=("--rows", "new.csv")).end()
    assert codes == [3, 3, 3]
    assert all("other settings" in error and "task" in error for _, error in found)


def in_clear(folders, whole):
    """The accuracy of the network that both holders' shares make, of the tables joined."""
    shares = [weights_at(folder / "run" / "share.safetensors") for folder in folders[:2]]
    weights = {name: decode(shares[0][name] + shares[1][name], 21) for name in shares[0]}
    (whole / "experiment.toml").write_text(EXPERIMENT.format(epochs=2))
    data = load_data(read_experiment(whole / "experiment.toml"))
    test = data["lender"].split.test
    values = torch.cat([data["bank"].inputs, data["shop"].inputs], 1).double()[test]
    hidden = torch.relu(values @ weights["0.weight"] + weights["0.bias"])
    outputs = hidden @ weights["1.weight"] + weights["1.bias"]
    return float(((outputs[:, 0] > 0).long() == data["lender"].labels[test]).double().mean())


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_party_that_is_killed_is_named_by_both_others(three, role):
    parties = three(epochs=100_000).start("--timeout-s", "20")
    assert parties.commands[2].stderr.readline() == "epoch 1\n"
    parties.commands[role].kill()
    started = time.monotonic()
    codes, found = parties.end()
    assert time.monotonic() - started < 45
    for other in {0, 1, 2} - {role}:
        text = found[other][1].rpartition("error[")[2]
        assert codes[other] == 3, text
        lost = rf"(party )?'?P{role}'? (cannot be reached|went away and did not come back)"
        assert re.search(lost, text), text
        assert "label party" not in text


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_party_that_is_started_again_cannot_come_back_into_its_session(three, role):
    """Its keys went with it, so all three end, and nothing hangs."""
    parties = three(epochs=100_000).start("--timeout-s", "20", "--join-s", "20")
    assert parties.commands[2].stderr.readline() == "epoch 1\n"
    parties.restart(role)
    started = time.monotonic()
    codes, found = parties.end()
    assert time.monotonic() - started < 75
    assert codes == [3, 3, 3]
    for folder, (card, error) in zip(parties.folders, found, strict=True):
        assert card == ""
        assert re.search(r"error\[V40[1456]\]", error), error
        assert "Traceback" not in error
        assert not list(folder.glob("runs/*/party.json"))


def test_another_option_at_one_party_is_named(three):
    parties = three().start("--hidden", "4", odd=1, more=("--no-flips",))
    codes, found = parties.end()
    assert codes == [3, 3, 3]
    assert all("flips" in error and "other settings" in error for _, error in found)


def test_other_rows_at_one_party(three):
    parties = three()
    path = parties.folders[1] / "shop.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    _, found = parties.start().end()
    assert all("other rows" in error for _, error in found)
    assert not any(re.search(r"c\d\d\d", error) for _, error in found)
