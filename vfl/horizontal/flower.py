"""Horizontal training over Flower: the strategy, the client's handler, and the noise mod."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from vfl.config.toml import check
from vfl.core.errors import LostPeerError, MissingPartyError, PeerFailedError, ProtocolError
from vfl.core.processes import looks
from vfl.core.seeds import Secret
from vfl.core.text import printable
from vfl.horizontal.average import Averager
from vfl.horizontal.client import ClientState, ClientTrainer, Update, add_noise
from vfl.horizontal.settings import HorizontalSettings
from vfl.horizontal.simulation import Evaluator, secret_of_client, shared_rows, simulated_client

#: Flower's name for the message that starts one round at a client: train.horizontal.
ACTION = "horizontal"
_WEIGHTS, _TERMS, _UPDATE, _FIGURES = "weights", "terms", "update", "figures"
_STORE = "store"
_STATE, _NORM = "horizontal", "horizontal-norm"


class HorizontalStrategy(Strategy):
    """Flower strategy that runs the rounds of an `Averager`.

    Args:
        averager: object that samples clients and averages their weight changes.
        evaluator: object whose method `after` the strategy calls at the end of each round.
        run: name of the training; each party accepts this name only with the settings with which it
            first received the name.
        nodes: Flower's ids of the nodes of all clients; the index in this list is the client's
            number.
        known: function that returns, for a client's number, the largest counter of this client's
            store that the server has seen.
        admit: function that the strategy calls with the number of a client and the counter in this
            client's reply; see `vfl.session.store.witness`.
    """

    def __init__(
        self,
        averager: Averager,
        evaluator: Evaluator,
        run: str,
        nodes: Iterable[int],
        known: Callable[[int], int] = lambda client: 0,
        admit: Callable[[int, int], None] = lambda client, count: None,
    ) -> None:
        self._averager, self._evaluator, self._run = averager, evaluator, run
        self._nodes, self._known, self._admit = list(nodes), known, admit

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return Flower messages that start the round, one for each client of the round."""
        averager = self._averager
        terms: dict[str, Any] = {
            "run": self._run,
            "round": server_round,
            "settings": averager.settings.model_dump_json(exclude_none=True),
            "norm": averager.norm,
        }
        return [
            Message(
                RecordDict({_WEIGHTS: arrays, _TERMS: ConfigRecord({**terms, **own})}),
                dst_node_id=self._nodes[client],
                message_type=f"train.{ACTION}",
            )
            for client in averager.participants(server_round)
            for own in [{"client": client, "known": self._known(client)}]
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Return the weights after a round.

        The updates are averaged in the order of the clients' numbers.

        Raises:
            PeerFailedError: a client reported an error. The error ends the training, because an
                average over the remaining clients would cover other rows than the parties agreed
                on.
            LostPeerError: a client did not reply in time.
        """
        answers = sorted(replies, key=lambda one: self._nodes.index(one.metadata.src_node_id))
        for answer in answers:
            if answer.has_error():
                raise PeerFailedError(
                    "a client of a horizontal training failed",
                    where=f"node {answer.metadata.src_node_id}, round {server_round}",
                    got=printable(answer.error.reason or "")[:500],
                    fix="its own log says why",
                )
            _raise_refusal(answer)
            client = self._nodes.index(answer.metadata.src_node_id)
            self._admit(client, _count_of(answer.content))
        missing = len(self._averager.participants(server_round)) - len(answers)
        if missing:
            raise LostPeerError(
                f"{missing} clients did not answer in time", where=f"round {server_round}"
            )
        self._averager.absorb([_update_of(one.content) for one in answers], server_round)
        self._evaluator.after(server_round)
        return arrays_of(self._averager.layers), MetricRecord({"clients": len(answers)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send no evaluation messages: the server tests the weights on its own rows."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Ignore replies to evaluation messages, because the strategy sends no such messages."""

    def summary(self) -> None:
        """Print no summary, because `vfl horizontal` prints the guarantees."""

    def run(self, grid: Grid, timeout_s: float) -> None:
        """Run all rounds of the training."""
        arrays = arrays_of(self._averager.layers)
        self.start(grid, arrays, self._averager.settings.rounds, timeout_s)


def wait_for_nodes(grid: Grid, count: int, patience_s: float) -> list[int]:
    """Return Flower's ids of all nodes in ascending order, as soon as enough nodes are connected.

    Raises:
        MissingPartyError: fewer nodes than `count` have connected in time.
    """
    nodes: list[int] = []
    for _ in looks(patience_s):
        if len(nodes := sorted(grid.get_node_ids())) >= count:
            return nodes
    raise MissingPartyError("not all clients are connected", got=str(len(nodes)), want=str(count))


def arrays_of(layers: Mapping[int, Tensor]) -> ArrayRecord:
    """Convert flat weights of layers to a Flower record."""
    return ArrayRecord({str(number): Array(one.numpy()) for number, one in layers.items()})


def layers_in(record: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the flat weights of the layers in a Flower record.

    Raises:
        ProtocolError: the record does not contain weights of layers.
    """
    found = {}
    for name, array in record.items():
        if not name.isascii() or not name.isdigit():
            raise ProtocolError("the layers of a horizontal training must have numbers as names")
        found[int(name)] = _floats(array.data)
    return found


def _floats(content: bytes) -> Tensor:
    """Return the numbers of a .npy file.

    The function checks the file's size before it allocates memory.
    """
    stream = BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
    except ValueError:
        version, shape, kind = (0, 0), (), np.dtype(np.void)
    there = len(content) - stream.tell()
    if version != (1, 0) or kind != np.float32 or len(shape) != 1 or 4 * shape[0] != there:
        raise ProtocolError(
            "a layer of a horizontal training must be a flat array of float32 numbers"
        )
    return torch.from_numpy(np.frombuffer(content, np.float32, offset=stream.tell()).copy())


def _update_of(content: RecordDict) -> Update:
    try:
        within = int(content[_FIGURES]["within"])  # type: ignore[arg-type]
        return Update(layers_in(content[_UPDATE]), within)
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("a client answered without a valid update") from None


def _count_of(content: RecordDict) -> int:
    """Return the counter of a client's store; a simulated client has no store and sends 0."""
    try:
        return int(content[_STORE]["count"]) if _STORE in content else 0  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("a client answered without a valid update") from None


def _raise_refusal(answer: Message) -> None:
    """If a client replied with an error, raise this error here, at the server."""
    told = answer.content.config_records.get("failure")
    if told is not None:
        raise PeerFailedError(
            "a client refuses the horizontal training",
            where=f"node {answer.metadata.src_node_id}",
            got=printable(str(told["what"]))[:1000],
            fix="its own log says why",
        )


class Terms:
    """Content of the message that begins a round at a client.

    Raises:
        ProtocolError: the message does not have the fields of a round's message.
        ConfigError: the settings in the message are invalid.
    """

    def __init__(self, content: RecordDict) -> None:
        try:
            told = content.config_records[_TERMS]
            self.run, self.client = str(told["run"]), int(told["client"])  # type: ignore[arg-type]
            self.round, self.norm = int(told["round"]), float(told["norm"])  # type: ignore[arg-type]
            self.known = int(told["known"])  # type: ignore[arg-type]
            settings = json.loads(str(told["settings"]))
            self.layers = layers_in(content.array_records[_WEIGHTS])
        except (KeyError, TypeError, ValueError):
            raise ProtocolError("this message does not belong to a horizontal training") from None
        self.settings = check(settings, HorizontalSettings, where="the terms of the training")
        if not 1 <= self.round <= self.settings.rounds or math.isnan(self.norm):
            raise ProtocolError("this round does not belong to the training")


def answer(
    message: Message,
    context: Context,
    terms: Terms,
    trainer: ClientTrainer,
    secret: Secret,
    count: int = 0,
) -> Message:
    """Run one round at a client; reply with the client's update and the counter of its store.

    The mod `NoiseMod` adds the noise to the reply before the reply leaves the node.

    Between rounds, the client's state is stored only in Flower's state of this node.
    """
    state = _state_of(context)
    update, state = trainer.update(terms.layers, state, terms.round, secret, terms.norm)
    context.state[_STATE] = ArrayRecord({"norms": Array(state.norms)})
    context.state[_NORM] = MetricRecord({"norm": state.norm})
    figures = MetricRecord(
        {"within": update.within, "moved": update.moved, "deviation": update.deviation}
    )
    content = RecordDict({_UPDATE: arrays_of(update.layers), _FIGURES: figures})
    if count:
        content[_STORE] = MetricRecord({"count": count})
    return Message(content, reply_to=message)


def _state_of(context: Context) -> ClientState:
    if _STATE not in context.state:
        return ClientState()
    norms = context.state.array_records[_STATE]["norms"].numpy()
    return ClientState(norms, float(context.state.metric_records[_NORM]["norm"]))  # type: ignore[arg-type]


class NoiseMod:
    """Client mod that adds the noise to a reply's update, and removes the deviation from the reply.

    Args:
        secret_of: function that returns the secret from which noise is derived; at a party, each
            update gets a new secret.
    """

    def __init__(self, secret_of: Callable[[Terms], Secret]) -> None:
        self._secret_of = secret_of

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Return the client's reply in the form that may leave the node: with noise."""
        reply = call_next(message, context)
        if reply.has_error() or _UPDATE not in reply.content:
            return reply
        terms, figures = Terms(message.content), reply.content.metric_records[_FIGURES]
        layers = layers_in(reply.content.array_records[_UPDATE])
        moved, deviation = float(figures["moved"]), float(figures["deviation"])  # type: ignore[arg-type]
        update = Update(layers, int(figures["within"]), moved, deviation)  # type: ignore[arg-type]
        noisy = add_noise(update, self._secret_of(terms), terms.round)
        reply.content[_UPDATE] = arrays_of(noisy.layers)
        reply.content[_FIGURES] = MetricRecord({"within": noisy.within})
        return reply


def simulated_client_app() -> ClientApp:
    """Make the ClientApp of a simulation.

    Each message states the number of the client that a node simulates.
    """
    app = ClientApp()

    @app.train(ACTION, mods=[NoiseMod(_simulated_secret)])
    def play(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        terms = Terms(message.content)
        trainer = simulated_client(terms.settings, shared_rows(terms.settings), terms.client)
        return answer(message, context, terms, trainer, _simulated_secret(terms))

    return app


def _simulated_secret(terms: Terms) -> Secret:
    return secret_of_client(terms.settings, terms.client)
