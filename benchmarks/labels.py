"""The page of labels inferred from cuts: its tables and figures, from stored rows.

    python -m benchmarks.labels            # writes docs/results/labels.md
    python -m benchmarks.labels --check    # fails where the page is stale

`vfl grid` measures the rows (`examples/thesis` and `examples/hidden_labels.toml`). In the template
of the page, ``{mnist potential:alpha=4 logistic 10}`` is the percentage of labels that an attack
with ten known labels a class infers. A format such as ``.0f`` may follow, or ``±`` for the
half-width of the interval too. In place of the attack and the number of known labels,
``accuracy`` is the test accuracy, and ``cost`` the accuracy lost to the defense; the defense
``scratch`` is a network trained on the known rows only. Links of `benchmarks.pages` may stand in
braces, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.harness import markdown_table
from benchmarks.pages import FOLDER, filled, keep, read_figure, records
from benchmarks.studies import over, points_text

#: Files of rows, by their names in the template.
FILES = {
    "mnist": "labels_mnist.csv",
    "inner": "labels_mnist_inner.csv",
    "wide": "labels_mnist_128.csv",
    "fashion": "labels_fashion.csv",
    "heavy": "labels_heavy.csv",
    "hidden_mnist": "hidden_labels_mnist.csv",
    "hidden_fashion": "hidden_labels_fashion.csv",
}
WHITENED, WIDE = "labels_hidden_whitened_mnist.csv", "labels_mlp_128.csv"
LABEL_FREE = "label_free:kind=pca,features=0"
ANCHORED = "anchored:rate=0.02+potential:alpha=2,norm=no"
#: Trainings of the two tables.
OF_THESIS = ("none", "layer_norm", "potential:alpha=4", "potential:alpha=16", "dcor:alpha=1")
HIDDEN = ("none", LABEL_FREE, ANCHORED)
#: Numbers of known labels of each class at which the best attack is named.
KNOWN = ("1", "5", "10")


@dataclass(frozen=True, slots=True)
class LabelRow:
    """A figure or a table of the page.

    Attributes:
        name: its name in the template.
        text: the text of the page.
    """

    name: str
    text: str


def rows_of(folder: Path, name: str, defense: str, *known: str) -> list[dict[str, str]]:
    """Return the rows of a defense; with `known`, of attacks with so many known labels a class."""
    found = [row for row in records(folder / FILES[name]) if row["defense"] == defense]
    return [row for row in found if not known or row["k"] in known]


def best(folder: Path, name: str, defense: str, k: str) -> float:
    """Return the percentage of labels that the best attack with k or no known labels infers."""
    return max(100 * float(row["mean"]) for row in rows_of(folder, name, defense, "0", k))


def thesis_table(folder: Path) -> str:
    """Return the attacks of the thesis; bold figures are at most those from scratch."""
    lines = []
    for defense in OF_THESIS:
        cells = [f"`{defense}`", text_of(f"mnist {defense} accuracy", folder)]
        cells.append(text_of(f"mnist {defense} kmeans 0 ±", folder))
        for row in rows_of(folder, "mnist", defense, *KNOWN, "40"):
            if row["attack"] == "fine_tuning":
                text = text_of(f"mnist {defense} fine_tuning {row['k']} ±", folder)
                safe = float(row["mean"]) <= float(row["baseline_scratch"])
                cells.append(f"**{text}**" if safe else text)
        lines.append(cells)
    head = ["training", "test accuracy", "clusters", "fine-tuned, k = 1", *KNOWN[1:], "40"]
    return markdown_table(head, lines)


def hidden_table(folder: Path) -> str:
    """Return accuracy and the best attack on MNIST and Fashion-MNIST, at each number of labels."""
    lines = []
    for defense in HIDDEN:
        cells = [f"`{defense}`"]
        for name in ("hidden_mnist", "hidden_fashion"):
            reached = (f"{best(folder, name, defense, k):.1f}" for k in KNOWN)
            cells += [text_of(f"{name} {defense} accuracy", folder), " / ".join(reached)]
        lines.append(cells)
    head = ["training", "MNIST: accuracy", "best attack", "Fashion-MNIST: accuracy", "best attack"]
    return markdown_table(head, lines)


def _three(texts: Sequence[str]) -> str:
    return "{}, {} and {}".format(*texts)


def whitened(folder: Path) -> dict[str, str]:
    """Return the best attacks on label-free and anchored bottoms with the 23rd attack, by name."""
    rows = records(folder / WHITENED)
    found: dict[str, list[list[float]]] = {LABEL_FREE: [], ANCHORED: []}
    for defense, by_k in found.items():
        for k in KNOWN:
            own = [row for row in rows if (row["training"], row["k"]) == (defense, k)]
            reads = [
                [float(row["accuracy"]) for row in own if row["attack"] == attack]
                for attack in dict.fromkeys(row["attack"] for row in own)
            ]
            by_k.append(max(reads, key=sum))
    pairs = zip(found[LABEL_FREE], found[ANCHORED], strict=True)
    less = [over(a - b for a, b in zip(*both, strict=True)) for both in pairs]
    reached = {name: _three([f"{100 * over(one).mean:.1f}" for one in by_k])
               for name, by_k in found.items()}  # fmt: skip
    return {
        "whitened": reached[ANCHORED],
        "whitened free": reached[LABEL_FREE],
        "whitened less": _three([points_text(one) for one in less]),
    }


def wide(folder: Path) -> dict[str, str]:
    """Return what two attacks infer with a cut of 128 units and from pictures alone, by name."""
    rows = records(folder / WIDE)
    found = {}
    attacks = {"mlp": "mlp:teacher=propagation,scaler=whiten",
               "inputs": "label_propagation:at=inputs"}  # fmt: skip
    for name, attack in attacks.items():
        of = [row for row in rows if row["attack"] == attack]
        by_seed = {row["seed"]: [float(r["accuracy"]) for r in of if r["seed"] == row["seed"]]
                   for row in of}  # fmt: skip
        found[f"wide {name}"] = points_text(over(map(fmean, by_seed.values())))
    return found


def _link(field: str) -> str:
    """Return the link of a figure of the template, in the form of `benchmarks.pages`."""
    name, _, rest = field.partition(" ")
    if name not in FILES:
        return field
    defense, what = rest.split(" ", 1)
    if what == "cost":
        return f"{_link(f'{name} none accuracy')} - {_link(f'{name} {defense} accuracy')}"
    if what == "accuracy":
        return f"{FILES[name]}?defense={defense}&k=0#test_accuracy*100"
    attack, k = what.rsplit(" ", 1)
    if defense == "scratch":
        return f"{FILES[name]}?defense=none&attack={attack}&k={k}#baseline_scratch*100"
    return f"{FILES[name]}?defense={defense}&attack={attack}&k={k}#mean*100"


def text_of(field: str, folder: Path) -> str:
    """Return the text of a figure of the template."""
    found = re.fullmatch(r"(.*?)(?: (\.\d)f)?( ±)?", field)
    assert found is not None, "each part may be empty"
    link, places = _link(found[1]), found[2] or ".1"
    figure = read_figure(link, folder)
    text = f"{figure.value:{places}f}"
    return f"{text} ± {figure.noise:{places}f}" if found[3] else text


def bench_labels(check: bool = False, folder: Path = FOLDER) -> list[LabelRow]:
    """Write the page of labels inferred from cuts.

    Args:
        check: only compare the page with the stored results, and fail if it differs.
        folder: folder of the stored results and of the page.

    Raises:
        VFLError: the page does not match the stored results.
    """
    before = {k: [best(folder, "hidden_mnist", one, k) for one in HIDDEN[1:]] for k in KNOWN}
    made = {
        "thesis": thesis_table(folder),
        "hidden": hidden_table(folder),
        "hidden less": _three([f"{free - own:.1f}" for free, own in before.values()]),
        **whitened(folder),
        **wide(folder),
    }
    rows: list[LabelRow] = []

    def given(field: str) -> str:
        text = made[field] if field in made else text_of(field, folder)
        rows.append(LabelRow(field, text))
        return text

    keep(folder / "labels.md", filled("labels", given), check)
    return rows


def shown(rows: Sequence[LabelRow]) -> str:
    """Return the number of figures as text."""
    return f"{len(rows)} figures and tables"


main = harness.command(bench_labels, shown)


if __name__ == "__main__":
    main()
