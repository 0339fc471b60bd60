"""A training over slow lines that are computed: all parties in one process, and no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from vfl.bench.messages import Mark, Marks
from vfl.bench.network import LinkModel, Wan
from vfl.bench.wan_setup import Setup
from vfl.session import Exchange
from vfl.training.local import LocalSession
from vfl.transport import local_pair


def modelled(setup: Setup) -> Marks:
    """Play all parties; seconds are those of the label party's clock on its line."""
    terms, label = setup.terms, setup.terms.label_party
    model = LinkModel([label, *terms.feature_parties], Wan.parse(setup.job.wan))
    marks: list[Mark] = []
    seconds = 0.0

    def schedule() -> Iterator[Exchange]:
        nonlocal seconds
        for _, part in groupby(setup.schedule(), key=lambda exchange: exchange.epoch):
            began = model.now(label)
            for exchange in part:
                yield exchange
                if exchange.trains and exchange.last:
                    seconds += model.now(label) - began

    def mark(record: dict[str, Any]) -> None:
        accuracy = record["test_accuracy"]
        marks.append(Mark(exchanges=record["steps"], seconds=seconds, accuracy=accuracy))

    LocalSession(
        setup.job.experiment,
        setup.parties,
        outputs=setup.outputs,
        connect=lambda party: model.between(label, party, local_pair()),
        on_epoch=mark,
    ).go_on(None, schedule())
    return Marks(marks=tuple(marks))
