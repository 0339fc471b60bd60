"""The server's part of a round: it samples clients, averages their updates, and may add noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vfl.core.errors import PeerFailedError
from vfl.core.seeds import Secret
from vfl.horizontal.client import Update, flat, followed, layers_of
from vfl.horizontal.plan import NoisePlan, participants
from vfl.horizontal.settings import HorizontalSettings
from vfl.privacy import kernel


class Averager:
    """Averages the weight changes that clients send.

    Args:
        settings: settings of the training.
        plan: noise plan.
        model: model with the initial weights.
        secret: the server's own secret, from which its noise and its sampling of clients are
            derived.

    Attributes:
        layers: current weights; the key is a layer's index, the value the layer's weights as a flat
            tensor.
        norm: clip norm of a client's whole update, if the server adds noise.
    """

    def __init__(
        self, settings: HorizontalSettings, plan: NoisePlan, model: nn.Module, secret: Secret
    ) -> None:
        self.settings, self.plan, self._secret = settings, plan, secret
        self.layers = {number: flat(one) for number, one in enumerate(layers_of(model))}
        self.norm = settings.clip_norm if settings.noise == "server" else math.inf

    def participants(self, round_number: int) -> list[int]:
        """Return the clients of a round.

        If the server adds noise, it draws each client independently.
        """
        settings = self.settings
        if settings.noise != "server":
            return participants(settings, round_number)
        draws = self._secret.uniform((settings.clients,), "horizontal clients", round_number)
        return [int(one) for one in (draws < settings.sampled / settings.clients).nonzero()[0]]

    def absorb(self, updates: Sequence[Update], round_number: int) -> None:
        """Add the mean of the weight changes that the clients sent to the weights.

        Raises:
            PeerFailedError: an update does not fit the network, or contains numbers that are not
                finite.
        """
        for update in updates:
            self._check(update)
        settings = self.settings
        senders: Mapping[int, list[Tensor]] = {
            number: [one.layers[number] for one in updates if number in one.layers]
            for number in self.layers
        }
        if settings.noise == "server":
            self._absorb_private(updates, round_number)
            return
        for number, changes in senders.items():
            total = torch.zeros_like(self.layers[number])
            for change in changes:
                total += change
            if changes:
                self.layers[number] = self.layers[number] + total / len(changes)

    def _absorb_private(self, updates: Sequence[Update], round_number: int) -> None:
        """Change the weights by a noisy mean.

        The noisy mean is the noisy sum of clipped updates divided by the expected number of
        clients.
        """
        count = sum(len(one) for one in self.layers.values())
        law = kernel.NoisySum(self.norm, self.plan.multiplier * self.norm, count)
        total = torch.zeros(count, dtype=torch.float64)
        for update in updates:
            change = torch.cat([update.layers[number].double() for number in self.layers])[None]
            factors = kernel.clip_factors(kernel.norms_of(change), law.bound)
            total += kernel.scaled(change, factors)[0]
        noisy = kernel.release([law], total, self._secret, "horizontal noise", round_number)
        noisy /= self.settings.sampled
        parts = torch.split(noisy, [len(one) for one in self.layers.values()])
        for (number, before), part in zip(list(self.layers.items()), parts, strict=True):
            self.layers[number] = before + part.to(before)
        if self.settings.clip == "quantile":
            self._follow([update.within for update in updates], round_number)

    def _check(self, update: Update) -> None:
        known = update.layers.keys() <= self.layers.keys()
        whole = self.settings.noise != "server" or update.layers.keys() == self.layers.keys()
        if (
            not known
            or not whole
            or update.within not in (0, 1)
            or not update.layers
            or any(
                one.shape != self.layers[number].shape or not bool(torch.isfinite(one).all())
                for number, one in update.layers.items()
            )
        ):
            raise PeerFailedError(
                "a client's update does not fit the network, or is not finite",
                want="finite weight changes of the layers that the server sent",
                fix="a smaller learning_rate, if the training diverges",
            )

    def _follow(self, within: Sequence[int], round_number: int) -> None:
        """Move the clip norm, by a noisy count of the updates within it."""
        share = kernel.share_within(
            torch.tensor([within], dtype=torch.bool), self.settings.sampled,
            self.plan.counts * 0.5, self._secret, "horizontal noise", "count", round_number,
        )  # fmt: skip
        self.norm = followed(self.norm, float(share), self.settings.percentile / 100)
