"""All parties of a network that nobody holds in one process: a thread each, the same frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from vfl.clients.whole_network import WholeNetworkParty, build_whole_party
from vfl.config import Experiment
from vfl.core.frame import Frame, Observer
from vfl.core.ledger import Ledger
from vfl.core.seeds import Secret
from vfl.core.storage import joint_digest
from vfl.datasets import PartyData
from vfl.server import EpochRecord, Objective
from vfl.server.whole_network import WholeNetworkLabel, build_whole_label
from vfl.session import CHECKPOINTS, Adversary, Checkpoints, Mode, Terms, secure
from vfl.session.checkpoint import newest_common
from vfl.session.exchange import HONEST, Own
from vfl.session.secure import Revealed
from vfl.session.trace import recorders_of
from vfl.training.local import Weights, secrets_of
from vfl.transport.link import Observed


class WholeNetworkSession:
    """One session of an experiment whose network nobody holds; as `LocalSession` is of others.

    Args:
        experiment: what to do.
        data: each party's aligned rows, by party, the label party's included.
        mode: train, evaluate or predict.
        outputs: number of classes, or 1 for a regression.
        secrets: each party's secret; parties left out get a repeatable stand-in from the seed.
        top: a module to use instead of the experiment's spec.
        weights: what `weights` gave after the training, by party.
        checkpoints: folder with a folder for each party's checkpoints; None saves nothing.
        adversaries: refused; nobody has anything to tamper with.
        observers: told about every frame besides the ledger.
        on_epoch: told one record an epoch.
        device: "cpu".
        say: told when a checkpoint is damaged.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        *,
        mode: Mode = "train",
        outputs: int,
        secrets: Mapping[str, Secret] | None = None,
        top: nn.Module | None = None,
        weights: Weights | None = None,
        checkpoints: Path | None = None,
        adversaries: Mapping[str, Adversary] | None = None,
        observers: Sequence[Observer] = (),
        on_epoch: Callable[[EpochRecord], None] = lambda record: None,
        device: str = "cpu",
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.terms = Terms.of(experiment, mode, experiment.name)
        self.ledger, self._say = Ledger(), say
        own_mode, label = secure.make(self.terms.secure), experiment.label.party
        own_mode.refuse(self.terms)
        weights, adversaries = weights or {}, adversaries or {}
        known = secrets_of(self.terms, data, secrets or {})
        names = list(dict.fromkeys([*data, *self.terms.peers]))
        self._kept = {name: self._checkpoints(checkpoints, name) for name in names}
        for own_rows in data.values():
            recorders_of(experiment.trace, checkpoints, self.terms, own_rows, None)
        own = {
            name: Own(known[name], adversaries.get(name, HONEST), device, self._kept[name])
            for name in names
        }
        session = token_hex(16)
        self._streams = own_mode.local_streams(self.terms)
        keys = own_mode.simulated_keys(known, self.terms, session, 0)
        self._everybody: list[WholeNetworkParty] = [
            build_whole_party(
                name,
                data.get(name),
                self.terms,
                keys[name],
                self._streams.outer[name],
                own[name],
                weights=weights.get(name),
            )
            for name in self.terms.peers
        ]
        self.clients = [one for one in self._everybody if one.name in data]
        watching: list[Observer] = [self.ledger, *observers]

        def receive_any() -> tuple[str, Frame]:
            name, frame = self._streams.receive_any()
            for observer in watching:
                observer(name, "up", frame)
            return name, frame

        self.label: WholeNetworkLabel = build_whole_label(
            data[label],
            self.terms,
            (session, 0),
            {
                name: Observed(link, name, "label", watching)
                for name, link in self._streams.inner.items()
            },
            receive_any,
            own[label],
            Objective.of(experiment.label, outputs, top),
            weights=weights.get(label),
            ledger=self.ledger,
            on_epoch=on_epoch,
        )

    def run(self) -> WholeNetworkSession:
        """Go through the whole session, or the rest of it."""
        start = self._start()
        programs: dict[str, Callable[[], object]] = {
            one.name: partial(one.play, start) for one in self._everybody
        }
        programs[self.label.data.name] = partial(self.label.play, start)
        self._streams.play(programs)
        return self

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Everybody's shares, by party."""
        everybody = {client.name: client.weights() for client in self.clients}
        return everybody | {self.label.data.name: self.label.weights()}

    def weights_digest(self) -> str:
        """One digest of the parties' own digests in name order."""
        digests = [(client.name, client.weights_digest()) for client in self.clients]
        return joint_digest([*digests, (self.label.data.name, self.label.weights_digest())])

    def outputs(self) -> Tensor:
        """What a prediction session gave, in row order; axes (rows, outputs)."""
        return torch.cat(self.label.outputs)

    def revealed(self) -> list[Revealed]:
        """What everybody learned, which only a process that plays all of them knows."""
        found = [each for one in self._everybody for each in one.revealed()]
        return found + self.label.revealed()

    def traffic(self) -> list[dict[str, Any]]:
        """What everybody sent, by receiver and phase."""
        networks = [*(one.network for one in self._everybody), self.label.network]
        return [each for one in networks for each in one.traffic()]

    def _start(self) -> int:
        """The exchange to go on with: the newest checkpoint that all parties have intact."""
        kept = [one for one in self._kept.values() if one is not None]
        if not kept:
            return 0
        committed = self._kept[self.terms.label_party]
        assert committed is not None, "either all parties save, or none"
        most = committed.committed()
        start = newest_common(kept, most)
        if start < most:
            self._say(f"checkpoint {most} is damaged; the training goes on from {start}")
        return start

    def _checkpoints(self, folder: Path | None, party: str) -> Checkpoints | None:
        if folder is None or self.terms.mode != "train":
            return None
        terms, every = self.terms, self.terms.train.checkpoint_every
        return Checkpoints(folder / party / CHECKPOINTS, party, terms.run, terms.digest(), every)
