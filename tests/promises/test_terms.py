"""Numbers of terms that only an attack has, held against a file that says nothing of them."""

import math

import numpy as np
import pytest
import torch
from promise import BrokenPromiseError
from pydantic import ValidationError

from vfl import compression, defenses
from vfl.compression import StepContext
from vfl.config import Consent, Experiment
from vfl.core.errors import SpecError, VFLError
from vfl.core.seeds import Secret
from vfl.datasets import Split
from vfl.session import Terms, check_consent

ROWS = 400
SPLIT = Split(np.arange(ROWS), np.arange(0), np.arange(0))
TRAINING = StepContext(step=1, training=True, secret=Secret.of_simulation(0, "bank"))


def asked(train=(), dp=None, **more):
    """The terms of a label party that attacks."""
    content = {
        "parties": {"bank": {"width": 4, "bottom": "mlp:hidden=8"}},
        "label": {"party": "lender"},
        "data": {"validation": 0.0},
        "train": {"optimizer": "sgd", **dict(train)},
        **more,
    } | ({"dp": dp} if dp else {})
    return Terms.of(Experiment.model_validate(content), "train", "run")


def consents(terms):
    """Whether a party takes part whose own file says nothing of these numbers."""
    try:
        check_consent(terms, "bank", Consent(), SPLIT)
    except VFLError:
        return False
    return True


def test_a_bottom_that_shrinks_below_its_noise():
    """Terms alone cannot shrink a cut until clipping and noise pass it as it is."""
    assert consents(asked(defense="clipped_noise:norm=4,sigma=4")), "not for its numbers"
    defense = "clipped_noise:norm=1e-37,sigma=4"
    terms = asked({"learning_rate": 1.0, "weight_decay": 0.999999}, defense=defense)
    if not consents(terms):
        return
    left = (1 - terms.train.learning_rate * terms.train.weight_decay) ** 4
    cut = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)) * left
    sent = defenses.make(defense).embedding(cut, TRAINING)
    alike = np.corrcoef(sent.double().flatten(), cut.double().flatten())[0, 1]
    epsilon = defenses.make(defense).privacy()[0].epsilon
    raise BrokenPromiseError(
        f"accepted: 4 steps leave {left:.0e} of each weight, and the noised cut has a correlation "
        f"of {alike:.3f} with the true one, at a stated epsilon of {epsilon:.3f}"
    )


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("train.learning_rate", {"train": {"learning_rate": 1e6}}),
        ("train.weight_decay", {"train": {"weight_decay": 1000.0}}),
        ("train.decay_of_a_step", {"train": {"learning_rate": 10.0, "weight_decay": 0.1}}),
        ("train.learning_rate", {"train": {"schedule": "one_cycle:max_lr=1e6,total_steps=20"}}),
        ("train.momentum", {"train": {"optimizer": "rmsprop:momentum=0.99999"}}),
        ("train.decay_of_a_step", {"train": {"optimizer": "asgd:lambd=1000"}}),
        ("train.momentum", {"train": {"momentum": math.nextafter(1.0, 0.0)}}),
        ("dp.clip", {"dp": {"noise": 1.0, "clip": 1e-30}}),
        ("dp.clips", {"dp": {"noise": 1.0, "clips": {"bank": 1e-30}}}),
        ("dp.delta", {"dp": {"noise": 1.0, "delta": 0.999}}),
        ("tasks.weight", {"tasks": [{"party": "insurer", "column": "y", "weight": 1e6}]}),
    ],
)
def test_no_number_of_the_terms_is_unbounded(name, terms):
    """A party whose file says nothing accepts no number of the terms that only an attack has."""
    assert consents(asked(dp={"noise": 1.0, "clips": {"bank": 0.5}})), "not for its numbers"
    open_to = Consent(label_parties=("insurer",)) if "tasks" in terms else Consent()
    try:
        check_consent(asked(**terms), "bank", open_to, SPLIT)
    except (VFLError, ValidationError):  # terms that are none
        return
    raise BrokenPromiseError(f"accepted: {name} of {terms}")


def accepted(registry, values):
    """Specs with one extreme number each that a family accepts."""
    needed = {"randtopk": "k=2", "label_dp": "epsilon=1"}
    for name in registry.names():
        for option, one in registry.options(name).items():
            if one.annotation not in (int, float, int | None, float | None):
                continue
            for value in values:
                more = needed.get(name, "")
                given = f"{option}={value}" + ("" if not more or option in more else f",{more}")
                try:
                    registry.make(f"{name}:{given}")
                except SpecError:
                    continue
                yield f"{name}:{given}"


@pytest.mark.parametrize(
    "registry", [compression.CODECS, defenses.DEFENSES], ids=["codec", "defense"]
)
def test_no_option_of_a_codec_or_defense_is_unbounded(registry):
    """No number in a codec's or a defense's spec is infinite, no number, or beyond all use."""
    known = {"clipped_noise:norm=inf", "gradient_noise:norm=inf"}  # say that they clip nothing
    found = [
        each for each in accepted(registry, ("1e300", "inf", "nan", "-1")) if each not in known
    ]
    if found:
        raise BrokenPromiseError(f"accepted: {len(found)} such specs, among them {found[0]}")
