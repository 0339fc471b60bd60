"""Rows of the table of results, made by hand."""

from vfl.experiments.results import Record


def attacked(training, attack, k, seed, value, *, measure="accuracy", adversary="none", **more):
    """What an attack reached on a victim once."""
    more = {"guess": 0.1, "seconds": 0.1, "threat": "A semi-honest feature party."} | more
    return Record(
        **about(training, seed, adversary), evaluator="attack", subject=attack, measure=measure,
        value=value, k=k, **more,
    )  # fmt: skip


def utility(training, seed, value, *, measure="accuracy", adversary="none"):
    """How good a victim is on the test rows."""
    return Record(
        **about(training, seed, adversary), evaluator="quality", subject="test rows",
        measure=measure, value=value,
    )  # fmt: skip


def about(training, seed, adversary):
    cell = f"{training}-seed{seed}-{adversary}"
    spec = {"codec": "none", "defense": training, "secure": "none", "adversary": adversary}
    return {"training": training, "cell": cell, "repeat": str(seed)} | spec
