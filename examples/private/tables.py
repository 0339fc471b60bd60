"""Train on three tables: split training with epsilon 1, 3, 8 or without; and logistic regression.

    python examples/private/tables.py --seeds 0 1 2 --out tables.jsonl

The tables adult, credit-default and bank-marketing are read from the folder in the environment
variable VFL_DATA; the experiments are those of examples/value. Each line of the file --out is one
training, with metrics of the test rows: AUC, expected calibration error, and the AUC of the worst
group by one column. A training whose line the file already contains is not repeated.
"""

import argparse
import gzip
import json
import os
import time
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from vfl.config import Experiment
from vfl.core.seeds import Secret, use_one_thread
from vfl.privacy.accountants import noise_for, poisson_steps
from vfl.privacy.dpsgd import PrivateHalf
from vfl.privacy.premise import prove
from vfl.training.local import LocalSession
from vfl.training.run import load_data

ADULT = (
    "age,workclass,fnlwgt,education,education_num,marital,occupation,relationship,race,sex,"
    "gain,loss,hours,country,label"
)
#: For each table, its file in the folder VFL_DATA, and the column that divides the test rows into
#: groups.
TABLES = {
    "adult": ("adult/adult.data.gz", "race"),
    "credit_default": ("credit-default/UCI_Credit_Card.csv.gz", "EDUCATION"),
    "bank_marketing": ("bank-marketing/bank-full.csv.gz", "job"),
}
EPSILONS, DELTA, LOT, EPOCHS = (1.0, 3.0, 8.0), 1e-5, 1024, 20
#: Learning rate of Adam, and clipping norm of the gradient of one row over all parties. Both values
#: were chosen on validation rows of two tables with two seeds, and are the same for all tables and
#: epsilons.
RATE, CLIP = 2e-3, 30.0
#: With noise, the split network is a sum of linear bottom models, because fewer weights need less
#: noise.
BOTTOM = "mlp:hidden=none"
SMALLEST = 100  # smallest number of test rows in a group whose AUC is reported


def source(name, folder):
    """Return the file of a table; Adult's two files are joined into one file with column names."""
    root = Path(os.environ["VFL_DATA"])
    path = root / TABLES[name][0]
    if name != "adult":
        return path
    whole = folder / "adult.csv"
    if not whole.exists():
        lines = [ADULT]
        for part in (path, path.with_name("adult.test.gz")):
            with gzip.open(part, "rt") as rows:
                lines += [row.strip().rstrip(".").replace(", ", ",") for row in rows
                          if row.count(",") == 14]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        whole.write_text("\n".join(lines) + "\n")
    return whole


def clips_of(data, clip):
    """Return each party's clipping norm, in proportion to the root of its number of columns.

    The norm of a row's gradient at a party is in proportion to the square root of the party's
    number of columns. Equal clipping norms would clip most of the gradient at the party with the
    most columns, and nothing at the other parties.
    """
    columns = {name: own.inputs[0].numel() for name, own in data.items()}
    whole = sum(columns.values())
    return {name: clip * (count / whole) ** 0.5 for name, count in columns.items()}


def experiment_of(name, folder, seed, dp=None, rate=None, clips=None):
    """Return a table's experiment; with privacy, its bottoms are linear and all epochs run."""
    content = tomllib.loads((Path(__file__).parents[1] / "value" / f"{name}.toml").read_text())
    content.pop("value", None)
    content["seed"] = seed
    content["data"]["source"] = str(source(name, folder))
    if dp is not None:
        content["dp"] = {"epsilon": dp, "delta": DELTA, "clips": clips, "accountant": "pld"}
        content["train"] = {"epochs": EPOCHS, "batch_size": LOT, "learning_rate": rate}
        for party in content["parties"].values():
            party |= {"bottom": BOTTOM, "width": 2}
        content["merge"], content["label"]["top"] = "sum", "identity"
    return Experiment.model_validate(content)


def split_outputs(experiment, data):
    """Return the split network's probabilities of class 2, for validation and test rows."""
    label = experiment.label.party
    session = LocalSession(experiment, data, outputs=data[label].outputs).run()
    tested = torch.cat(session.label.tested).softmax(1)[:, 1].numpy()
    judged = max(one["validation_auc"] for one in session.label.history[-1:])
    return tested, judged


def logistic_outputs(experiment, data, epsilon, rate, clip, seed):
    """Return the outputs of a logistic regression on all columns in one process."""
    label = experiment.label.party
    split, labels = data[label].split, data[label].labels
    inputs = torch.cat([data[name].inputs.flatten(1) for name in experiment.parties], 1)
    train = torch.from_numpy(split.train)
    steps, q = EPOCHS * poisson_steps(len(train), LOT), LOT / len(train)
    secret = Secret.of_simulation(seed, "logistic")
    model = nn.Linear(inputs.shape[1], 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    half = PrivateHalf(
        model, norm=clip, noise=noise_for(epsilon, DELTA, steps, q, "pld"), batch_size=LOT,
        secret=secret, party="central",
    )  # fmt: skip
    prove(half.clipper, model, [inputs.shape[1:]], "the model")
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(steps):
        at = train[torch.from_numpy(secret.uniform((len(train),), "rows", step) < q)]
        with half.recording() as calls:
            outputs = model(inputs[at])
        grad = outputs.detach().softmax(1) - nn.functional.one_hot(labels[at], 2)
        half.give_gradients(outputs, grad, calls, step)
        optimizer.step()
    with torch.no_grad():
        found = model(inputs).softmax(1)[:, 1].numpy()
    judged = roc_auc_score(labels[split.validation], found[split.validation])
    return found[split.test], judged


def figures(scores, labels, groups):
    """Return AUC, calibration error over ten equal bins, and the smallest AUC of a group."""
    order = np.array_split(np.argsort(scores), 10)
    gaps = [abs(scores[part].mean() - labels[part].mean()) * len(part) for part in order]
    whole = roc_auc_score(labels, scores)
    by_group = {}
    for group in np.unique(groups):
        at = groups == group
        if at.sum() >= SMALLEST and 0 < labels[at].sum() < at.sum():
            by_group[str(group)] = roc_auc_score(labels[at], scores[at])
    worst = min(by_group, key=by_group.get)
    return {"auc": whole, "calibration": sum(gaps) / len(scores), "worst_group": worst,
            "worst_auc": by_group[worst],
            "gap": max(by_group.values()) - by_group[worst]}  # fmt: skip


def main():
    """Read the arguments and run the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("tables"))
    parser.add_argument("--out", type=Path, default=Path("tables.jsonl"))
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--clip", type=float, default=CLIP)
    asked = parser.parse_args()
    use_one_thread()
    done = asked.out.read_text().splitlines() if asked.out.exists() else []
    names = ("table", "seed", "way", "epsilon", "rate", "clip")
    known = [tuple(json.loads(line)[name] for name in names) for line in done]
    given = asked.rate, asked.clip
    ways = [("split", None, None, None)]
    ways += [(way, epsilon, *given) for epsilon in EPSILONS for way in ("split", "logistic")]
    for seed in asked.seeds:
        for name in asked.tables:
            data = None
            for way, epsilon, rate, clip in ways:
                law = (name, seed, way, epsilon, rate, clip)
                if law in known:
                    continue
                started = time.process_time()
                experiment = experiment_of(name, asked.folder, seed)
                data = data or load_data(experiment)
                if way == "split" and epsilon is not None:
                    clips = clips_of(data, clip)
                    experiment = experiment_of(name, asked.folder, seed, epsilon, rate, clips)
                own = data[experiment.label.party]
                if way == "split":
                    scores, judged = split_outputs(experiment, data)
                else:
                    scores, judged = logistic_outputs(experiment, data, epsilon, rate, clip, seed)
                column = TABLES[name][1]
                table = pd.read_csv(experiment.data.source, sep=None, engine="python",
                                    usecols=lambda each, column=column: each == column)  # fmt: skip
                test = own.split.test
                groups = table[column].astype(str).to_numpy()[test]
                record = dict(zip(names, law, strict=True)) | {"validation_auc": judged}
                record |= figures(scores, own.labels.numpy()[test], groups)
                record["cpu_s"] = time.process_time() - started
                rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
                with asked.out.open("a") as lines:
                    print(json.dumps(rounded), file=lines)


if __name__ == "__main__":
    main()
