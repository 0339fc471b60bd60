"""Every registered defense, and chains of them, are under contract."""

import pytest
import torch
from torch import nn

from vfl.core.errors import BadOptionError, SpecError
from vfl.core.registry import parse
from vfl.defenses import DEFENSES, Defense, PrivacyStatement, make
from vfl.testing import DefenseContract


class TestRegisteredDefenses(DefenseContract):
    specs = (
        "none",
        "layer_norm",
        "none+none+layer_norm",
        "potential",
        "potential:alpha=16,distance=chordal,norm=no",
        "dcor:alpha=8",
        "nopeek",
        "dcor+nopeek:alpha=2",
        "probe",
        "probe:support=2,whiten=yes",
        "bottleneck:alpha=0.1",
        "confusion",
        "confusion:contrast=1,entropy=0",
        "confusion+potential",
        "label_free:features=0",
        "label_free:kind=autoencoder,epochs=2",
        "label_free:kind=scarf,epochs=1,mask=0.9",
        "anchored",
        "anchored:rate=1+probe:whiten=yes",
        "clipped_noise+label_free:kind=autoencoder,epochs=1",
        "pretrained:epochs=1",
        "label_free:kind=simclr,epochs=1",
        "label_free:kind=vicreg,epochs=1,mask=0",
        "label_free:kind=vime,epochs=2",
        "few_rounds:epochs=1",
        "few_rounds:steps=2,epsilon=1,kind=vicreg,epochs=1",
        "few_rounds:steps=0,epsilon=0,kind=vime,epochs=1+gradient_averaging",
        "label_dp:epsilon=1",
        "label_dp:flip=0.6",
        "label_dp:epsilon=0,prior=0.5-0.3-0.2",
        "label_dp_two_stage:epochs=1",
        "label_dp_two_stage:epsilon=0,epochs=2,share=0.9",
        "label_dp_two_stage:epochs=1+clipped_noise",
        "gradient_noise",
        "gradient_noise:norm=inf,sigma=0.1",
        "gradient_noise:norm=0.1,sigma=3,law=laplace",
        "tpsl:epsilon=0.1",
        "clipped_noise",
        "clipped_noise:norm=inf,sigma=0,queries=false",
        "clipped_noise:norm=0.5,sigma=2,law=laplace",
        "mixup:alpha=1",
        "gradient_averaging:rows=0",
        "gradient_sparsification:share=0.01",
        "passport:count=2",
        "passport:reach=0,sigma=0",
        "split_guard:start=0,share=0.5,checks=100",
        "vflip",
        "vflip:deviations=0",
        "copur",
        "copur:code=1,steps=3",
        "subspace_votes",
        "subspace_votes:views=1,rows=32,deviations=0",
        *("split_and_denoise", "split_and_denoise:eta=1e-6,norm=1,hidden=4"),
        *("santext", "santext:epsilon=0", "custext:words=4", "custext:words=1+layer_norm"),
        "label_dp:epsilon=1+gradient_noise+gradient_averaging+layer_norm+clipped_noise",
    )

    def test_every_registered_name_is_here(self):
        specs = [*self.specs, *TestTwoClasses.specs]
        named = {parse(part)[0] for spec in specs for part in spec.split("+")}
        assert named == set(DEFENSES.names())


class TestTwoClasses(DefenseContract):
    specs = ("marvell", "marvell:shape=iso", "marvell:power=0", "max_norm", "tpsl+max_norm")
    classes = 2


class TestNarrowCut(DefenseContract):
    specs = ("none", "layer_norm", "potential", "dcor", "probe:whiten=yes", "label_free:features=0")
    width = 1


class TestManyClasses(DefenseContract):
    specs = ("potential", "probe", "confusion")
    width = 40
    classes = 12


class InPlace(Defense):
    def gradient(self, grad, labels, context):
        return grad.mul_(2)


class GlobalNoise(Defense):
    def embedding(self, cut, context):
        return cut + torch.randn_like(cut)


class Detached(Defense):
    def logits(self, logits, context):
        return logits.detach().requires_grad_()


class BatchScaled(Defense):
    def embedding(self, cut, context):
        return cut / cut.abs().max()


class Averageable(Defense):
    """New noise for every query."""

    asked = 0

    def embedding(self, cut, context):
        type(self).asked += 1
        return cut + self.asked


class Unhelpful(Defense):
    def prepare(self, kind):
        if kind.classes is None:
            raise SpecError("no")


class Forgetful(Defense):
    """Counts, and forgets the count in its checkpoint."""

    def __init__(self):
        self.count = 0

    def gradient(self, grad, labels, context):
        self.count += 1
        return grad * self.count


class Misplaced(Defense):
    side = "label"

    def embedding(self, cut, context):
        return cut


class Unsaved(Defense):
    """Keeps what it fits where no checkpoint looks."""

    def wrap_bottom(self, bottom, width):
        self.scale = 1.0
        return Scaled(self, bottom)

    def fit(self, bottom, inputs, secret):
        self.scale = float(inputs.std())


class Scaled(nn.Module):
    def __init__(self, defense, bottom):
        super().__init__()
        self.defense, self.bottom = defense, bottom

    def forward(self, inputs):
        return self.bottom(inputs) / self.defense.scale


class Shrinking(Defense):
    """Says less for more rows."""

    def working_bytes(self, rows, columns, width):
        return 1000 - rows


class Unrelated(Defense):
    """What it makes of a returned cut does not depend on it."""

    def restorer(self, sent, returned):
        class Layers(nn.Linear):
            def forward(self, back, cut, noisy):
                return super().forward(cut)

        return Layers(sent, returned)


class Promising(Defense):
    """An epsilon without a unit."""

    def privacy(self):
        return (PrivacyStatement("labels", "everybody", epsilon=1.0),)


HOOKS = "hooks_keep_shapes_and_are_reproducible"
MODELS = "wrapped_models_train_and_save_fitted_weights"
COST = "cost_is_known_from_shapes_alone"
DECLARED = "side_promises_and_refusals_are_declared"
PREDICTION = "prediction_is_deterministic_and_independent_of_its_batch"
BROKEN = [
    (Shrinking, COST, "becomes smaller for more rows"),
    (Unsaved, MODELS, "not part of the weights"),
    (InPlace, HOOKS, "changed in place: gradient"),
    (GlobalNoise, HOOKS, "a global random generator changed: torch"),
    (Detached, "gradients_flow_through", "logits lost its graph"),
    (BatchScaled, PREDICTION, "a row's prediction depends on the other rows"),
    (Averageable, PREDICTION, "could average"),
    (Unhelpful, DECLARED, "suggests no fix"),
    (Forgetful, "state_survives_a_checkpoint", "not restored"),
    (Misplaced, DECLARED, "embedding never run at side 'label'"),
    (Unrelated, "restorer_keeps_shapes_and_trains", "without a gradient graph"),
    (Promising, DECLARED, "needs both an epsilon and its unit, or neither"),
]


def test_every_test_of_the_contract_finds_something():
    assert {f"test_{test}" for _, test, _ in BROKEN} == {
        name for name in dir(DefenseContract) if name.startswith("test_")
    }


@pytest.mark.parametrize(("broken", "test", "why"), BROKEN)
def test_the_contract_finds_a_defense_that_breaks_it(monkeypatch, broken, test, why):
    monkeypatch.setattr(DEFENSES, "_members", {"broken": broken})
    with pytest.raises(AssertionError, match=why):
        getattr(DefenseContract(), f"test_{test}")("broken")


@pytest.mark.parametrize(
    "spec",
    [
        *(f"anchored:rate={rate}" for rate in ("-0.1", "2")),
        *("few_rounds:steps=-1", "few_rounds:epsilon=-1", "tpsl:epsilon=0", "mixup:alpha=0"),
        *("gradient_averaging:rows=-1", "passport:count=0"),
        *("vflip:deviations=-1", "copur:code=0", "copur:steps=-1"),
        *("subspace_votes:views=0", "subspace_votes:rows=31", "subspace_votes:deviations=-1"),
        *(f"gradient_sparsification:share={share}" for share in (0, 1.1)),
        *(f"marvell:{option}" for option in ("power=-1", "power=inf", "shape=round")),
        *(
            f"{name}:{option}"
            for name in ("gradient_noise", "clipped_noise")
            for option in ("norm=0", "norm=-1", "sigma=-1", "sigma=inf", "delta=0", "delta=1")
        ),
        *("gradient_noise:law=uniform", "split_guard:start=-1", "split_guard:checks=0"),
        *("split_guard:share=0", "split_guard:share=0.6", "split_guard:threshold=2"),
        *("split_and_denoise:eta=0", "split_and_denoise:norm=0", "split_and_denoise:hidden=6"),
        *("santext:epsilon=-1", "custext:epsilon=inf", "custext:words=0"),
        *(
            "label_free:epochs=0",
            "label_free:mask=1",
            "label_free:features=-1",
            "pretrained:mask=1",
        ),
        *("label_dp", "label_dp:epsilon=1,flip=0.1", "label_dp:epsilon=-1", "label_dp:epsilon=inf"),
        *("label_dp:flip=0", "label_dp:flip=1", "label_dp:flip=0.1,prior=0.5-0.5"),
        *(f"label_dp:epsilon=1,prior={prior}" for prior in ("0.5", "0.5-0.6", "a-b")),
    ],
)
def test_options_out_of_range(spec):
    with pytest.raises(BadOptionError):
        make(spec)
