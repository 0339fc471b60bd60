"""Promises about `SplitModule`: a defense that is named acts, or the step ends in an error."""

import pytest
import torch
from promise import BrokenPromiseError
from torch import nn

from vfl import SplitModule
from vfl.core.errors import VFLError
from vfl.session.trace import Trace

ROWS, WIDTH = 64, 8
#: Each acts on gradients, or through the loss; none at the bottom's end.
DEFENSES = [
    "gradient_noise:norm=0.01,sigma=10",
    "gradient_averaging",
    "gradient_sparsification",
    "marvell",
    "max_norm",
    "tpsl",
    "potential:norm=no",
    "dcor",
    "probe",
]


def rows_and_labels():
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % 2
    return torch.randn(ROWS, 5, generator=draw) + labels[:, None], labels


def gradients_of(defense, step):
    """What a feature party receives in one step of a training loop, axes (rows, width)."""
    torch.manual_seed(0)
    bottom, top, trace = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 2), Trace()
    model = SplitModule({"bank": bottom}, top, {"bank": WIDTH}, defense=defense, observers=[trace])
    step(model, *rows_and_labels())
    (frame,) = [frame for frame in trace if frame.direction == "down"]
    return torch.frombuffer(bytearray(frame.payload), dtype=torch.float32).view(ROWS, WIDTH)


def labels_read(gradients):
    """How many labels a feature party finds: gradients of two classes point opposite ways."""
    _, labels = rows_and_labels()
    right = int(((gradients @ gradients[0] < 0) == (labels == 1)).sum())
    return max(right, ROWS - right)


def require_refused_or_defended(defense, step, how):
    try:
        found = gradients_of(defense, step)
    except VFLError:
        return
    if torch.equal(found, gradients_of("none", step)):
        raise BrokenPromiseError(
            f"'{defense}' did nothing {how}: all {found.numel()} values of the gradients are those "
            f"without it, and their signs tell {labels_read(found)} of {ROWS} labels"
        )


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_loop_without_labels_is_defended(defense):
    """A training batch is never undefended because the loop did not hand over its labels."""

    def step(model, inputs, labels):
        nn.functional.cross_entropy(model({"bank": inputs}), labels).backward()

    require_refused_or_defended(defense, step, "in a loop that passes no labels")


@pytest.mark.parametrize("defense", ["potential:norm=no", "dcor", "probe"])
def test_a_loss_without_the_defenses_term_is_defended(defense):
    """A defense that acts through the loss is never left out of it without a word."""

    def step(model, inputs, labels):
        nn.functional.cross_entropy(model({"bank": inputs}, labels), labels).backward()

    require_refused_or_defended(defense, step, "in a loss without extra_loss()")


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_training_in_evaluation_mode_is_defended(defense):
    """Gradients are never undefended because the model was in evaluation mode."""

    def step(model, inputs, labels):
        model.eval()
        nn.functional.cross_entropy(model({"bank": inputs}), labels).backward()

    require_refused_or_defended(defense, step, "after model.eval()")


@pytest.mark.parametrize("merge", ["mean", "summ", "Concat"])
def test_cuts_are_merged_as_named(merge):
    """A merge that does not exist is refused, as an experiment file refuses it."""

    def outputs_of(merge):
        torch.manual_seed(0)
        bottoms = {name: nn.Linear(5, WIDTH) for name in ("bank", "shop")}
        model = SplitModule(bottoms, nn.Identity(), dict.fromkeys(bottoms, WIDTH), merge=merge)
        inputs, _ = rows_and_labels()
        return model({"bank": inputs, "shop": -inputs})

    try:
        outputs = outputs_of(merge)
    except VFLError:
        return
    if torch.equal(outputs, outputs_of("sum")):
        raise BrokenPromiseError(
            f"merge='{merge}' was accepted, and all {outputs.numel()} outputs are those of a sum"
        )
