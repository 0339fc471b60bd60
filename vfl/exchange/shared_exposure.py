"""What shared first layers refuse: whatever needs the weights, their gradient or a party's cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from vfl import defenses
from vfl.config import TrainSettings
from vfl.config.experiment import PARTY_NAME
from vfl.defenses import uses
from vfl.errors import ExposedCutError
from vfl.exchange.adversary import HONEST, Adversary

#: Hooks of a defense that run on a feature party's bottom, cut, inputs or gradient.
_AT_FEATURE_PARTIES = ("wrap_bottom", "fit", "batch", "embedding", "local_loss", "received")


class Shares(Protocol):
    """What of the agreed settings matters here."""

    @property
    def defense(self) -> str: ...
    @property
    def feature_parties(self) -> list[str]: ...
    @property
    def label_party(self) -> str: ...
    @property
    def train(self) -> TrainSettings: ...


def refuse_beside_shares(agreed: Shares, dealer: str) -> None:
    """Refuse what cannot stand beside shared first layers.

    Raises:
        ExposedCutError: with the reason.
        SpecError: the defense cannot be built.
    """
    _check_dealer(dealer, agreed.label_party, agreed.feature_parties)
    _check_training(agreed.train)
    if hooks := uses(defenses.make(agreed.defense), *_AT_FEATURE_PARTIES):
        raise ExposedCutError(
            "this defense works on what no feature party has: its bottom, its cut or its gradient",
            got=f"defense = '{agreed.defense}' ({', '.join(hooks)})",
            want="a defense of labels, of gradients at the label party, or of the top",
        )


def refuse_adversary(party: str, adversary: Adversary) -> None:
    """Refuse to play a dishonest feature party, which would tamper with what it does not have.

    Raises:
        ExposedCutError: it is not honest.
    """
    if adversary is not HONEST:
        raise ExposedCutError(
            f"party '{party}' has neither bottom nor gradient of its own to tamper with",
            got=type(adversary).__name__,
            want="an honest feature party, or secure = 'none' or 'sum'",
        )


def nobodys_bottom(party: str) -> ExposedCutError:
    """What is told to whoever asks for a party's bottom, or for its cut."""
    return ExposedCutError(
        "with shared first layers no party has a bottom, and nobody a cut",
        got=f"bottom or cut of party '{party}'",
        want="secure = 'none' or 'sum' for what looks at one",
    )


def _check_dealer(dealer: str, label_party: str, feature_parties: Sequence[str]) -> None:
    if dealer in feature_parties:
        raise ExposedCutError(
            "a dealer that holds a share could undo every mask",
            got=f"dealer '{dealer}', a feature party",
            want=f"dealer={label_party}, the label party, or a third party that has no columns",
        )
    if not re.fullmatch(PARTY_NAME, dealer):
        raise ExposedCutError(
            "no party can have the dealer's name",
            got=f"dealer '{dealer}'",
            want=f"dealer={label_party}, the label party, or the name of a third party",
        )


def _check_training(train: TrainSettings) -> None:
    """Only what is linear in the gradient, with public numbers that need no division."""
    wanted = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "in_flight": 1}
    reasons = {
        "optimizer": "its steps are no linear function of the gradient, which nobody may see",
        "momentum": "a fraction of shared numbers would have to be cut off at every step",
        "weight_decay": "a fraction of shared numbers would have to be cut off at every step",
        "in_flight": "weights that wait for several gradients are not built for shares",
    }
    for name, value in wanted.items():
        if (got := getattr(train, name)) != value:
            raise ExposedCutError(
                f"train.{name} cannot be so where weights are shared: {reasons[name]}",
                got=f"train.{name} = {got}",
                want=f"train.{name} = {value}",
            )
