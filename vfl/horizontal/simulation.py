"""A horizontal training with all clients in this process, and tests of the trained weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.config import PartyFile
from vfl.core import seeds
from vfl.core.errors import DataError, TooFewRowsError
from vfl.core.seeds import Secret
from vfl.core.storage import weights_digest
from vfl.datasets import Dealing, Label, load_bundled, load_own
from vfl.horizontal.average import Averager
from vfl.horizontal.client import (
    ClientState,
    ClientTrainer,
    Update,
    add_noise,
    build_model,
    load,
)
from vfl.horizontal.plan import plan_noise
from vfl.horizontal.settings import HorizontalSettings
from vfl.privacy import PrivacyStatement
from vfl.session.store.party_folder import own_table, require_numbers

_TEST_ROWS = 4096
#: Function that receives the result of a test: the number of its round, and the metrics by name.
Tested = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one training.

    Attributes:
        layers: final weights; the key is a layer's index, the value the layer's weights as a flat
            tensor.
        tests: for each test, the number of its round and the metrics; the last test is that of the
            final weights.
        statements: privacy guarantees; the first guarantee is the one whose epsilon is in the
            settings.
        seconds: duration.
    """

    layers: Mapping[int, Tensor]
    tests: tuple[Mapping[str, float], ...]
    statements: tuple[PrivacyStatement, ...]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON, without the weights."""
        told = [one.as_dict() for one in self.statements]
        last = {name: value for name, value in self.tests[-1].items() if name != "round"}
        tests = [dict(one) for one in self.tests]
        digest = weights_digest({str(number): layer for number, layer in self.layers.items()})
        return {
            **last,
            "weights_sha256": digest,
            "seconds": self.seconds,
            "tests": tests,
            "privacy": told,
        }


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A data set whose training rows are divided among the clients.

    Attributes:
        inputs: inputs, axes (rows, *shape).
        labels: labels, axes (rows,).
        train: for each client, the indices of its training rows.
        test: indices of the test rows, which no client has.
        outputs: number of classes.
    """

    inputs: Tensor
    labels: Tensor
    train: tuple[Tensor, ...]
    test: Tensor
    outputs: int

    @property
    def fewest(self) -> int:
        """Number of training rows of the client that has the fewest."""
        return min(len(one) for one in self.train)


def shared_rows(settings: HorizontalSettings) -> SharedRows:
    """Load a simulation's data set, and divide its training rows evenly by the public seed.

    Raises:
        TooFewRowsError: there are fewer training rows than clients.
        DataError: see `vfl.datasets.load_bundled`.
    """
    return _shared(settings.source, settings.rows, settings.seed, settings.clients)


@lru_cache(maxsize=1)
def _shared(source: str, rows: int | None, seed: int, clients: int) -> SharedRows:
    data = load_bundled(source, ["all"], "all", Dealing(seed, validation=0.0, limit=rows))["all"]
    assert data.inputs is not None, "the data set's single party has all columns"
    assert data.labels is not None, "and the labels"
    train = torch.from_numpy(data.split.train)
    if len(train) < clients:
        raise TooFewRowsError(
            "every client of a simulation needs at least one row",
            where="horizontal.clients",
            got=f"{len(train)} training rows for {clients} clients",
        )
    order = torch.from_numpy(seeds.permutation(seed, len(train), "clients' rows"))
    dealt = torch.tensor_split(train[order], clients)
    return SharedRows(
        data.inputs, data.labels, dealt, torch.from_numpy(data.split.test), data.outputs
    )


@torch.no_grad()
def figures_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and loss of a model on some rows."""
    model.eval()
    right, loss = 0.0, 0.0
    for start in range(0, len(labels), _TEST_ROWS):
        rows = slice(start, start + _TEST_ROWS)
        output = model(inputs[rows])
        right += float((output.argmax(1) == labels[rows]).sum())
        loss += float(F.cross_entropy(output, labels[rows], reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}


class Evaluator:
    """Tests the weights of an averager after some rounds.

    Args:
        settings: settings; `test_every` determines after which rounds the weights are tested.
        averager: averager whose weights are tested.
        model: model into which the weights are loaded.
        inputs: inputs of the test rows, axes (rows, *shape).
        labels: labels of the test rows, axes (rows,).
        on_test: function that receives the result of every test.
    """

    def __init__(
        self,
        settings: HorizontalSettings,
        averager: Averager,
        model: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        on_test: Tested | None = None,
    ) -> None:
        self._settings, self._averager, self._model = settings, averager, model
        self._inputs, self._labels, self._on_test = inputs, labels, on_test
        self._started = time.monotonic()
        self.tests: list[Mapping[str, float]] = []

    def after(self, round_number: int) -> None:
        """Test the weights, if the settings require a test after this round."""
        settings = self._settings
        if round_number % settings.test_every and round_number != settings.rounds:
            return
        load(self._model, self._averager.layers)
        found: dict[str, float] = {"round": round_number}
        found |= figures_of(self._model, self._inputs, self._labels)
        if settings.noise == "server":
            found["clip_norm"] = self._averager.norm
        self.tests.append(found)
        if self._on_test:
            self._on_test(found)

    def outcome(self) -> Outcome:
        """Return the result of the training, after the last round."""
        averager, seconds = self._averager, time.monotonic() - self._started
        return Outcome(averager.layers, tuple(self.tests), averager.plan.statements, seconds)


def simulate(settings: HorizontalSettings, on_test: Tested | None = None) -> Outcome:
    """Train with all clients in this process.

    The clients' secrets are derived from the public seed. Flower's simulation with the same
    settings yields the same weights, bit for bit.

    Raises:
        PrivacyError: no noise multiplier is large enough for the budget, or the model mixes rows.
        PeerFailedError: the training diverged.
        DataError: see `shared_rows`.
    """
    data = shared_rows(settings)
    model, averager, evaluator = simulated_server(settings, on_test)
    trainers: dict[int, ClientTrainer] = {}
    states = [ClientState()] * settings.clients
    for number in range(1, settings.rounds + 1):
        updates: list[Update] = []
        for client in averager.participants(number):
            if client not in trainers:
                trainers[client] = simulated_client(settings, data, client, model)
            secret = secret_of_client(settings, client)
            found, states[client] = trainers[client].update(
                averager.layers, states[client], number, secret, averager.norm
            )
            updates.append(add_noise(found, secret, number))
        averager.absorb(updates, number)
        evaluator.after(number)
    return evaluator.outcome()


def simulated_server(
    settings: HorizontalSettings, on_test: Tested | None = None
) -> tuple[nn.Module, Averager, Evaluator]:
    """Return the network of a simulation, its averager, and the tests of the averager's weights.

    Args:
        settings: settings of the training.
        on_test: function that receives the result of every test.
    """
    data = shared_rows(settings)
    model = build_model(settings, tuple(data.inputs.shape[1:]), data.outputs)
    secret = Secret.of_simulation(settings.seed, "horizontal server")
    averager = Averager(settings, plan_noise(settings, data.fewest), model, secret)
    tested = data.inputs[data.test], data.labels[data.test]
    return model, averager, Evaluator(settings, averager, model, *tested, on_test)


def simulated_client(
    settings: HorizontalSettings, data: SharedRows, client: int, model: nn.Module | None = None
) -> ClientTrainer:
    """Return one client of a simulation, with its rows of the data set."""
    rows, plan = data.train[client], plan_noise(settings, data.fewest)
    return ClientTrainer(settings, plan, data.inputs[rows], data.labels[rows], data.outputs, model)


def secret_of_client(settings: HorizontalSettings, client: int) -> Secret:
    """Return a simulated client's secret; anyone with the seed can compute it."""
    return Secret.of_simulation(settings.seed, f"horizontal client {client}")


def own_rows(party: PartyFile, settings: HorizontalSettings) -> tuple[Tensor, Tensor]:
    """Return all rows of a party's table: inputs, and labels as indices of the settings' classes.

    Numeric columns are standardised by the means and scales of the party's own table; these
    statistics stay with the party.

    Raises:
        DataError: the table has no label column, or has a class that the settings do not name, or
            has text columns, whose categories each party would number differently.
    """
    own = party.table
    if own.label is None:
        raise DataError(
            "a client of a horizontal training needs labels",
            where="data.label",
            fix="name the label column in [data] of the party's own file",
        )
    with party.locations.located(PartyFile):
        label = Label(party.party, own.label)
        data = load_own(party.party, own_table(party), label, Dealing(settings.seed, 0.0, 0.0))
    assert data.inputs is not None, "it has columns"
    assert data.labels is not None, "and labels"
    assert data.classes is not None, "of classes"
    known = {name: number for number, name in enumerate(settings.classes or ())}
    unknown = sum(str(one) not in known for one in data.classes)
    if unknown:
        raise DataError(
            "a party's table has classes that the training does not list",
            where="horizontal.classes",
            got=f"{unknown} of {len(data.classes)} classes unknown",
            fix="list all classes in [horizontal], spelled as in the tables",
        )
    require_numbers(data)
    places = torch.tensor([known[str(one)] for one in data.classes])
    return data.inputs, places[data.labels]
