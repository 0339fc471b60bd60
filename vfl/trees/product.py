"""Registration of `vfl.trees` with the core of vfl, which imports no product."""

from __future__ import annotations

from vfl.core.products import Product

PRODUCT = Product(
    commands={
        "Compare and attack": {"bins": "vfl.trees.scorecard.command:bins"},
        "Train and predict": {
            "importance": "vfl.trees.command:importance",
            "scorecard": "vfl.trees.scorecard.command:scorecard",
        },
    },
    members={
        "vfl.attacks": {
            "bins": "vfl.trees.attacks.bins:Bins",
            "nodes": "vfl.trees.attacks.nodes:Nodes",
            "own_columns": "vfl.trees.attacks.bins:OwnColumns",
            "splits": "vfl.trees.attacks.splits:Splits",
            "sums": "vfl.trees.attacks.sums:Sums",
        },
        "vfl.secure": {
            "regression": "vfl.trees.regression:Regression",
            "scorecard": "vfl.trees.scorecard.mode:Scorecard",
            "trees": "vfl.trees.mode:Trees",
        },
    },
    takes_missing_rows=("trees",),
    sections={
        "importance": "vfl.trees.pages:importance",
        "regression": "vfl.trees.pages:regression",
    },
    cases={"trees": "vfl.trees.attacks.cases:TreesCases"},
)
