"""Every setting of an experiment, set to another value: it changes the result, or is refused."""

import json
from functools import cache
from itertools import count

import numpy as np
import pandas as pd
import pytest
from settings_walked import SettingsWalk, of

from vfl.config import Experiment, read_experiment
from vfl.core.seeds import use_one_thread
from vfl.training.run import train

#: One table whose columns two parties share, and what each case below starts from.
TABLE = """\
seed = 1
[data]
source = "table.csv"
id = "key"
validation = 0.2
[parties.bank]
width = 4
bottom = "mlp:hidden=8"
columns = ["a*", "d*"]
[parties.shop]
width = 4
bottom = "mlp:hidden=8"
columns = ["b*"]
[label]
column = "y"
top = "mlp:hidden=8"
[train]
epochs = 2
batch_size = 16
learning_rate = 0.01
"""


def instead(text, *changes):
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


#: Two parties and a label party with a table each.
TABLES = instead(
    TABLE,
    ('"table.csv"', '"label.csv"'),
    ('columns = ["a*", "d*"]', 'source = "bank.csv"'),
    ('columns = ["b*"]', 'source = "shop.csv"'),
)
DIGITS = instead(
    TABLE,
    ('"table.csv"\nid = "key"', '"digits"\nrows = 120'),
    ('columns = ["a*", "d*"]\n', ""),
    ('columns = ["b*"]\n', ""),
    ('column = "y"\n', ""),
)
#: A set that has validation rows and test rows of its own.
PAIRS = instead(DIGITS, ('"digits"', '"digit_pairs"'), ("validation = 0.2\n", ""))
BASES = {"table": TABLE, "tables": TABLES, "digits": DIGITS, "pairs": PAIRS}
MIDDLE = ("middle.party=hub", "middle.width=4", "middle.model=mlp:hidden=8")
DP = ("dp.noise=1.0", "train.optimizer=sgd")
TASK = {"party": "'clinic'", "column": "'z'", "top": "'mlp:hidden=8'"}
#: Settings of a further label party, with other values.
OF_TASK = {
    "party": "'doctor'",
    "column": "'y'",
    "task": "'regression'",
    "top": "'mlp:hidden=9'",
    "class_weight": "'balanced'",
    "loss": "'focal'",
    "hits": "2",
    "calibration": "'platt'",
    "weight": "3.0",
    "source": "'other.csv'",
}


def task(**settings):
    told = ", ".join(f"{name}={value}" for name, value in (TASK | settings).items())
    return f"[{{{told}}}]"


#: Settings and sections whose difference does not show in a training of one process, and why.
ELSEWHERE = {
    "name": "names the folders of runs, and nothing that is computed",
    "purpose": "parties consent to it, and logs have it: tests/session/test_consent.py",
    "data.repeats": "no id of these tables repeats: tests/datasets/test_tables_as_they_are.py",
    "align": "vfl align reads it: tests/training/test_alignment.py",
    "federation": "addresses and patience of a deployment: tests/federation",
    "compare": "vfl compare reads it: tests/experiments",
    "grid": "vfl grid and vfl attack read it: tests/experiments",
    "value": "vfl value reads it: tests/experiments",
    "train.checkpoint_every": "when checkpoints are written, which a run removes or goes on from: "
    "tests/test_resume.py",
    "train.warm_start": "weights of an earlier run: tests/training/test_warm_start.py",
    "train.compile": "the same numbers by compiled code, after minutes: tests/session/test_compute",
    "dp.accountant": "'pld' needs a package that a plain installation lacks: tests/privacy",
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    use_one_thread()
    folder = tmp_path_factory.mktemp("settings")
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(160, 6)).round(1)
    frame = pd.DataFrame(numbers, columns=["a0", "a1", "a2", "b0", "b1", "b2"])
    frame["d"] = pd.date_range("2020-01-01", periods=160).strftime("%d.%m.%Y").to_numpy()
    frame["y"] = (numbers[:, 0] + numbers[:, 3] > 0.6).astype(int)
    frame["z"] = draw.integers(0, 3, 160)
    frame.insert(0, "key", np.arange(160))
    frame.insert(1, "other", draw.permutation(160))
    frame.to_csv(folder / "table.csv", index=False)
    frame.assign(a0=frame["a0"] * frame["b0"]).to_csv(folder / "other.csv", index=False)
    frame[["key", "y"]].to_csv(folder / "label.csv", index=False)
    frame[["key", "a0", "a1", "a2", "d"]].iloc[:150].to_csv(folder / "bank.csv", index=False)
    frame[["key", "b0", "b1", "b2"]].iloc[10:].to_csv(folder / "shop.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def result(tables):
    """What a training leaves: figures, bytes, weights, and the names and sizes of its files."""
    numbers = count()

    @cache
    def does(base, *settings):
        path = tables / f"{base}.toml"
        path.write_text(BASES[base])
        name = f"run-{next(numbers)}"
        summary = train(read_experiment(path, settings), tables / "runs", name)
        run = tables / "runs" / name
        times = ("seconds", "steps_per_second", "run", "traffic")
        figures = {key: value for key, value in summary.items() if key not in times}
        files = sorted(
            str(one.relative_to(run)) for one in run.glob("parties/**/*") if one.is_file()
        )
        return json.dumps([figures, files], sort_keys=True)

    return does


class TestSettings(SettingsWalk):
    models = (("", Experiment),)
    bases = BASES
    cases = (
        ("seed", "2", "table"),
        ("codec", "topk:k=2", "table"),
        ("defense", "noise:scale=0.5", "table"),
        ("merge", "sum", "table"),
        ("secure", "sum", "table", "merge=sum"),
        ("data.source", "other.csv", "table"),
        ("data.id", "other", "table"),
        ("data.separator", ";", "table", "digits"),
        ("data.encoding", "utf-16", "table"),
        ("data.encoding", "latin-1", "digits"),
        ("data.decimal", ",", "table", "digits"),
        ("data.dates", "{d='%d.%m.%Y'}", "table", "digits"),
        ("data.skip_lines", "1", "table", "digits"),
        ("data.missing", "['0']", "table", "digits"),
        ("data.numbers", "{d=','}", "table", "digits"),
        ("data.repeats", "first", "digits"),
        ("data.id_type", "number", "table", "digits"),
        ("data.id", "key", "digits"),
        ("data.id_rules", "zeros", "table"),
        ("data.alignment", "nowhere", "table", "tables"),
        ("data.missing_rows", "token", "tables"),
        ("data.validation", "0.3", "table", "pairs"),
        ("data.test", "0.3", "table", "pairs"),
        ("data.bins", "4", "table", "digits"),
        ("data.split", "stratified", "table", "digits"),
        ("data.memory", "64MiB", "tables", "digits"),
        ("data.rows", "60", "table", "tables", "digits"),
        ("data.rows", "60", "table", "data.memory=64MiB"),
        ("data.folds", "4", "table"),
        ("data.fold", "2", "table", "data.folds=4"),
        ("data.fold", "2", "table"),
        ("data.side", "4", "digits", "table"),
        ("data.classes", "3", "digits", "table"),
        ("data.length", "4", "digits"),
        ("data.vocabulary", "9", "digits"),
        ("data.tokenizer", "small", "digits"),
        ("parties.bank.width", "5", "table"),
        ("parties.bank.bottom", "mlp:hidden=9", "table"),
        ("parties.bank.columns", "['a0']", "table", "tables"),
        ("parties.bank.source", "other.csv", "tables"),
        ("parties.bank.augment", "noise", "table", "tables", "digits"),
        ("parties.bank.branches", "2", "table"),
        ("parties.bank.branches", "2", "table", *DP),
        ("parties.bank.shape", "[1, 2, 2]", "table", "tables"),
        ("parties.bank.shape", "[1, 8, 4]", "digits"),
        ("label.party", "bank", "table"),
        ("label.column", "z", "table", "digits"),
        ("label.task", "regression", "table", "digits"),
        ("label.top", "mlp:hidden=9", "table"),
        ("label.loss", "focal", "table"),
        ("label.class_weight", "balanced", "table"),
        ("label.hits", "2", "table"),
        ("label.calibration", "platt", "table"),
        ("middle.party", "other", "table", *MIDDLE),
        ("middle.width", "5", "table", *MIDDLE),
        ("middle.model", "mlp:hidden=9", "table", *MIDDLE),
        ("middle.codec", "topk:k=2", "table", *MIDDLE),
        ("train.epochs", "3", "table"),
        ("train.batch_size", "8", "table"),
        ("train.optimizer", "sgd", "table"),
        ("train.schedule", "exponential:gamma=0.5", "table"),
        ("train.warmup_steps", "4", "table"),
        ("train.clip_norm", "0.01", "table"),
        ("train.learning_rate", "0.02", "table"),
        ("train.momentum", "0.5", "table", "train.optimizer=sgd"),
        ("train.momentum", "0.5", "table"),
        ("train.weight_decay", "0.1", "table"),
        ("train.in_flight", "2", "table"),
        ("train.local_steps", "3", "table"),
        ("train.local_angle", "40", "table"),
        ("train.local_angle", "5", "table", "train.local_steps=3"),
        ("train.precision", "bfloat16", "table"),
        ("train.patience", "1", "table", "train.epochs=12", "train.learning_rate=1.0"),
        ("train.keep", "best", "table", "train.epochs=12", "train.learning_rate=1.0"),
        ("train.measure", "accuracy", "table"),
        (
            "train.measure",
            "accuracy",
            "table",
            "train.keep=best",
            "train.epochs=12",
            "train.learning_rate=1.0",
        ),
        ("train.shuffle", "blocks", "table"),
        ("train.block_rows", "8", "table", "train.shuffle=blocks"),
        ("train.block_rows", "8", "table"),
        ("train.window_blocks", "2", "table", "train.shuffle=blocks", "train.block_rows=8"),
        ("train.window_blocks", "2", "table"),
        ("dp.epsilon", "5.0", "table", *DP),
        ("dp.noise", "2.0", "table", *DP),
        ("dp.delta", "1e-3", "table", *DP),
        ("dp.clip", "0.5", "table", *DP),
        ("dp.clips", "{bank=0.5}", "table", *DP),
        ("dp.clip_by", "layer", "table", *DP),
        ("dp.quantile", "0.5", "table", *DP),
        ("dp.sampling", "shuffled", "table", *DP),
        ("dp.unit", "client", "table", *DP),
        ("dp.unit", "client", "table", *DP, "parties.bank.branches=4"),
        ("trace.phases", "train", "table"),
        ("trace.epochs", "2", "table"),
        ("trace.epochs", "2", "table", "trace.phases=train"),
        ("trace.snapshots", "1", "table"),
        *(
            ("tasks", task(**{name: value}), "table", f"tasks={task()}")
            for name, value in OF_TASK.items()
        ),
    )
    elsewhere = ELSEWHERE

    def test_every_setting_of_a_task_has_a_case(self):
        listed = {name.split(".")[1] for name in of(Experiment) if name.startswith("tasks.")}
        assert listed == {*OF_TASK}
