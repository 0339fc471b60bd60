"""The paths that need one process: the network in one piece, and all its parties together."""

from __future__ import annotations

import torch
from torch import nn, optim

from vfl.bench.halves import Monolith
from vfl.bench.messages import Job, Measurement
from vfl.bench.network import LinkModel, Wan
from vfl.bench.setup import Setup
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY
from vfl.server.task import Classification, Meter
from vfl.training.local import Connect, LocalSession
from vfl.transport import local_pair


def monolith(setup: Setup) -> Measurement:
    """Train the whole network as one plain torch module in a plain torch loop.

    It keeps the figures of an epoch that a label party keeps, loss and accuracy.
    """
    network = Monolith(list(setup.bottoms().values()), setup.top())
    train = setup.experiment.train
    optimizer = optim.SGD(network.parameters(), lr=train.learning_rate, momentum=train.momentum)
    criterion = nn.CrossEntropyLoss()
    inputs = [own.inputs for own in setup.data.values() if own.inputs is not None]
    labels = setup.data[LABEL_PARTY].labels
    assert labels is not None, "the label party holds the labels"
    meters: dict[int, Meter] = {}
    for exchange in setup.schedule():
        rows = torch.from_numpy(exchange.rows)
        targets = labels[rows]
        logits = network([own[rows] for own in inputs])
        loss = criterion(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        meter = meters.setdefault(exchange.epoch, Meter(Classification(), "train"))
        meter.add(logits.detach(), targets, loss.item())
    return setup.measurement(meters[max(meters)].figures()["train_loss"])


def modelled(job: Job) -> Measurement:
    """Train in process, on the clocks of the parties' lines: compute takes no time there."""
    model = LinkModel([LABEL_PARTY, *FEATURE_PARTIES], Wan.parse(job.wan))
    setup = Setup(job, now=lambda: model.now(LABEL_PARTY))
    return in_process(setup, lambda party: model.between(LABEL_PARTY, party, local_pair()))


def in_process(setup: Setup, connect: Connect = lambda party: local_pair()) -> Measurement:
    """Train with every party in this process, over in-process links."""
    session = LocalSession(
        setup.experiment,
        setup.data,
        outputs=setup.workload.outputs,
        bottoms=setup.bottoms(),
        top=setup.top(),
        mode="train",
        connect=connect,
    )
    session.go_on(None, setup.schedule())
    return setup.measurement(session.label.history[-1]["train_loss"])
