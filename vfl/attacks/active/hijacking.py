"""Feature-space hijacking: a label party trains a bottom to produce codes that it can invert."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vfl.attacks.active.base import ActiveAdversary
from vfl.attacks.base import Attack, key_of, require_at_least, through
from vfl.attacks.inputs.inversion import decoder
from vfl.attacks.inputs.sdar import discriminator
from vfl.attacks.view import Grant, View
from vfl.compression import StepContext
from vfl.core.errors import UserError
from vfl.core.seeds import scoped
from vfl.models.optimizers import descend


class Bending(ActiveAdversary, Attack):
    """Base class: a label party trains bottoms to produce codes that its own decoder can invert.

    A subclass creates `_draw`, `_decoder` and its other networks in the method `begin`. The
    subclass's method `_parts` returns all these networks and their optimisers.

    Args:
        victim: feature party whose gradient the attacker replaces; "all" for every feature party.
    """

    who = "label party"
    goal = "inputs"
    needs = frozenset({Grant.CUTS})
    _draw: torch.Generator

    def __init__(self, victim: str) -> None:
        self.victim = victim
        self._decoder: nn.Module | None = None
        self._cuts: dict[str, Tensor] = {}

    @abstractmethod
    def _learn(self, cuts: Tensor) -> None:
        """Train the attacker's own networks on a batch of the victim's cuts."""

    @abstractmethod
    def _loss(self, cuts: Tensor) -> Tensor:
        """Return the loss that the victim's bottom shall reduce; low for cuts like the codes."""

    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """Return the attacker's networks and optimisers, by name."""

    def received(self, party: str, values: Tensor, context: StepContext) -> None:
        if context.training and self.victim in ("all", party):
            self._learn(values)
            self._cuts[party] = values

    def gradient(self, party: str, grad: Tensor, context: StepContext) -> Tensor:
        if self.victim not in ("all", party):
            return grad
        cut = self._cuts[party].detach().clone().requires_grad_()
        (bent,) = torch.autograd.grad(self._loss(cut), cut)
        return bent

    def run(self, view: View, draw: torch.Generator) -> Tensor:
        if self._decoder is None:
            raise UserError(
                "this adversary decodes only cuts that it influenced itself",
                got="no training that it took part in",
                fix="train the victim together with this adversary first",
            )
        return through(self._decoder, view.targets.cuts)

    def training_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()} | {
            "draw": self._draw.get_state()
        }

    def load_training_state(self, saved: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        self._draw.set_state(saved["draw"])


class Hijacking(Bending):
    """FSHA: sends the victim the gradient of the attacker's critic instead of the task's gradient.

    The attacker trains an autoencoder on its own rows, with an encoder of the victim's
    architecture. The attacker also trains a critic (a second network) that distinguishes the
    encoder's codes from the victim's cuts. The critic's gradient moves the victim's cuts towards
    the distribution of the codes, so that the attacker's decoder can invert them. After the
    victim's training, this class runs as an `Attack` and decodes the targets' cuts.

    The critic only makes the distribution of cuts similar to the distribution of codes. The decoder
    reconstructs the right row from a cut only because bottom and encoder have the same
    architecture. For a convolutional bottom, the reconstruction is almost exact. For a bottom with
    a dense layer, the reconstruction fails: the layer can undo a rotation of the inputs, so rotated
    inputs can give the same cuts (Semenov et al. 2024, "Just a simple transformation is enough for
    data protection in vertical federated learning").

    Source: Pasquini et al. 2021, "Unleashing the tiger: inference attacks on split learning", with
    the Wasserstein critic of the authors' code (Gulrajani et al. 2017).

    Args:
        victim: feature party whose gradient the attacker replaces; "all" for every feature party.
        learning_rate: learning rate of the attacker's networks.
        penalty: weight of the critic's gradient penalty.
        critic_steps: critic steps for each step of the other networks.

    Raises:
        BadOptionError: an option is out of range.
    """

    holds = frozenset({Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE})

    def __init__(
        self,
        victim: str = "all",
        learning_rate: float = 0.001,
        penalty: float = 10.0,
        critic_steps: int = 1,
    ) -> None:
        require_at_least(0, learning_rate=learning_rate, penalty=penalty, critic_steps=critic_steps)
        super().__init__(victim)
        self.learning_rate = learning_rate
        self.penalty = penalty
        self.critic_steps = critic_steps

    def begin(self, view: View, draw: torch.Generator) -> None:
        self._public, self._draw = view.leaked.inputs, draw
        with scoped(key_of(draw)):
            self._encoder = view.new_bottom().train()
            self._width = through(self._encoder, self._public[:2]).shape[1]
            self._encoder.train()
            self._decoder = decoder(self._width, tuple(self._public.shape[1:]))
            self._critic = discriminator(self._width)
        self._coding = self._adam(self._encoder, self._decoder)
        self._judging = self._adam(self._critic)

    def _learn(self, cuts: Tensor) -> None:
        with scoped(key_of(self._draw)):
            self._train(cuts)

    def _loss(self, cuts: Tensor) -> Tensor:
        realness: Tensor = self._critic(cuts).mean()
        return -realness

    def _parts(self) -> dict[str, Any]:
        networks = {"encoder": self._encoder, "decoder": self._decoder, "critic": self._critic}
        return networks | {"coding": self._coding, "judging": self._judging}

    def _train(self, cuts: Tensor) -> None:
        """Train the autoencoder for one step on the attacker's rows, and the critic for several."""
        assert self._decoder is not None
        rows = torch.randint(len(self._public), (len(cuts),), generator=self._draw)
        inputs = self._public[rows]
        codes = self._encoder(inputs)
        descend(self._coding, mse_loss(self._decoder(codes), inputs))
        for _ in range(self.critic_steps):
            descend(self._judging, self._judgement(codes.detach(), cuts))

    def _judgement(self, codes: Tensor, cuts: Tensor) -> Tensor:
        """Return the critic's loss, which is low for high outputs on codes and low ones on cuts."""
        share = torch.rand(len(cuts), 1, generator=self._draw)
        between = (share * codes + (1 - share) * cuts).requires_grad_()
        (slope,) = torch.autograd.grad(self._critic(between).sum(), between, create_graph=True)
        steepness: Tensor = (slope.norm(dim=1) - 1).square().mean()
        loss: Tensor = self._critic(cuts).mean() - self._critic(codes).mean()
        return loss + self.penalty * steepness

    def _adam(self, *modules: nn.Module) -> torch.optim.Adam:
        weights: list[Any] = [weight for module in modules for weight in module.parameters()]
        return torch.optim.Adam(weights, lr=self.learning_rate)
