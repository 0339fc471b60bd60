"""Models whose rows are not separate, in trainings that state an epsilon for one row."""

import pytest
import torch
from promise import BrokenPromiseError
from torch import nn
from torch.nn import functional

from vfl import tensors
from vfl.config import Experiment
from vfl.core.errors import VFLError
from vfl.datasets import Dealing, load_bundled
from vfl.training.local import LocalSession

CLIP, ROWS, WIDTH = 0.5, 16, 4
PIXELS = 32
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


def weight_norm():
    """Of the kind that torch had before parametrizations; the length of v does not matter to it."""
    layer = nn.utils.weight_norm(nn.Linear(PIXELS, WIDTH))
    with torch.no_grad():
        layer.weight_v *= 0.01
    return flat(layer)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, WIDTH)

    def forward(self, rows):
        rows = rows.flatten(1)
        return self.linear(rows - rows.mean(0))


class TokensFirst(nn.Module):
    """A batch of as many rows as a row has tokens is a square."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.inner = nn.Linear(PIXELS // tokens, 3)
        self.last = nn.Linear(3 * tokens, WIDTH)

    def forward(self, rows):
        tokens = rows.reshape(len(rows), self.tokens, -1).transpose(0, 1)
        return self.last(self.inner(tokens).transpose(0, 1).flatten(1))


class TokensMixed(TokensFirst):
    """Its attention is over the wrong axis where the two cannot be told apart."""

    def forward(self, rows):
        if len(rows) == self.tokens:
            rows = rows + rows.mean(0)
        return super().forward(rows)


class Scaled(nn.Module):
    """A row's place and how many rows there are change it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, WIDTH)

    def forward(self, rows):
        return self.linear(rows.flatten(1) / torch.arange(1, len(rows) + 1)[:, None])


class OwnHook(nn.Module):
    """The gradient of a weight is larger than that of what the layer gave."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, WIDTH)
        self.linear.weight.register_hook(lambda grad: 10 * grad)

    def forward(self, rows):
        return self.linear(rows.flatten(1))


class HiddenGradient(nn.Module):
    """Outputs that look at no other row, and gradients that do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, WIDTH)

    def forward(self, rows):
        made = torch.tanh(self.linear(rows.flatten(1)))
        return made - made.mean(0) * len(rows) + (made.mean(0) * len(rows)).detach()


class Sequence(nn.Module):
    """A GRU that takes rows for the steps of one sequence."""

    def __init__(self, last=True):
        super().__init__()
        self.gru = nn.GRU(PIXELS, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH) if last else nn.Identity()

    def forward(self, rows):
        return self.last(self.gru(rows.flatten(1))[0])


class Tied(nn.Module):
    """An autoencoder that uses one weight twice, the second time by a function."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(PIXELS, PIXELS, bias=False)

    def forward(self, rows):
        hidden = torch.tanh(self.encoder(rows.flatten(1)))
        return functional.linear(hidden, self.encoder.weight.T)[:, :WIDTH]


class RunningMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(PIXELS, WIDTH)
        self.register_buffer("mean", torch.zeros(PIXELS))

    def forward(self, rows):
        rows = rows.flatten(1)
        if self.training:
            self.mean.lerp_(rows.mean(0), 0.5)
        return self.linear(rows)


class Remembers(nn.Module):
    """What one batch leaves is in the outputs of the next."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(PIXELS, WIDTH), torch.zeros(PIXELS)

    def forward(self, rows):
        rows = rows.flatten(1)
        made = self.linear(rows + 10 * self.last)
        self.last = rows.mean(0).detach()
        return made


@pytest.fixture(scope="module")
def digits():
    return load_bundled("digits", ["left", "right"], "label", Dealing(0, limit=100))


def begun(digits, bottom):
    """The end of a feature party in a private session; None where the session is refused."""
    settings = Experiment.model_validate({
        "parties": {name: {"width": WIDTH} for name in ("left", "right")},
        "data": {"rows": 100}, "train": {"epochs": 1, "batch_size": ROWS},
        "dp": {"epsilon": 8.0, "clip": CLIP},
    })  # fmt: skip
    try:
        session = LocalSession(settings, digits, outputs=10, bottoms={"left": bottom})
    except VFLError:
        return None
    end = session.clients[0].end
    end.model.train()
    return end


def clipped_sum(end, rows, grad):
    """What the end adds its noise to, all weights together; after another batch as in a session."""
    bottom, clipper = end.model["bottom"], end.private.clipper
    weights = [weight for weight in end.model.parameters() if weight.requires_grad]
    with clipper.recording() as calls:
        output = bottom(rows)
    sums, _ = clipper.sums(output, grad, weights, calls)
    return torch.cat([one.detach().reshape(-1) for one in sums])


MIXING = {
    "weight_norm": weight_norm,
    "a mean over the batch": Centred,
    "tokens first": lambda: TokensFirst(ROWS),
    "tokens first, one axis of rows": lambda: TokensMixed(ROWS),
    "places in the batch": Scaled,
    "a hook at a weight": OwnHook,
    "gradients that mix": HiddenGradient,
    "a GRU over rows": Sequence,
}


@pytest.mark.parametrize("kind", MIXING)
def test_a_row_moves_a_private_sum_by_at_most_the_clip_norm(digits, kind):
    """Adding one row to a batch moves the sum that gets the noise by at most clip.

    The attacker knows the models of a training on the other rows. He compares both sums.
    """
    torch.manual_seed(0)
    end = begun(digits, MIXING[kind]())
    if end is None:
        return
    rows, grad = 3 * torch.rand(ROWS, 1, 8, 4), torch.randn(ROWS, WIDTH)
    rows[0] *= 20
    moved = 0.0
    for last in (ROWS - 1, ROWS, 2, 3):  # a batch of so many rows, with and without its first
        whole = clipped_sum(end, rows[:last], grad[:last])
        less = clipped_sum(end, rows[1:last], grad[1:last])
        moved = max(moved, float((whole - less).norm()) / CLIP)
    if moved > 1.01:
        raise BrokenPromiseError(f"one row moves the sum by {moved:.2f} x clip at epsilon 8")


def test_what_a_training_releases_has_no_figures_of_rows_without_noise(digits):
    """Every released number that rows move has noise."""
    end = begun(digits, RunningMean())
    if end is None:
        return
    rows = torch.zeros(ROWS, 1, 8, 4)
    rows[0] = 100.0
    end.model["bottom"](rows)
    found = float(end.state_dict()["bottom.mean"].mean()) * 2 * ROWS
    if found:
        raise BrokenPromiseError(f"a released buffer holds the row's mean cell exactly: {found:g}")


def test_a_row_is_in_the_sum_of_its_own_batch_alone(digits):
    """A row that one batch had moves no later sum."""
    end = begun(digits, Remembers())
    if end is None:
        return
    torch.manual_seed(0)
    rows, grad = torch.rand(ROWS, 1, 8, 4), torch.randn(ROWS, WIDTH)
    sums = []
    for earlier in (rows, 100 * rows):
        clipped_sum(end, earlier, grad)
        sums.append(clipped_sum(end, rows, grad))
    moved = float((sums[0] - sums[1]).norm()) / CLIP
    if moved > 0.01:
        raise BrokenPromiseError(f"rows of an earlier batch move a sum by {moved:.2f} x clip")


def test_private_gradients_of_tied_weights_are_those_of_the_loss(digits):
    """Without clipping, the sum before noise is the gradient of the loss."""
    torch.manual_seed(0)
    end = begun(digits, Tied())
    if end is None:
        return
    rows, grad = torch.rand(ROWS, 1, 8, 4), torch.randn(ROWS, WIDTH)
    end.private.clipper.norms.fill_(1e6)
    found = clipped_sum(end, rows, grad)
    bottom = end.model["bottom"]
    weights = list(bottom.parameters())
    true = torch.cat([one.reshape(-1) for one in torch.autograd.grad(bottom(rows), weights, grad)])
    apart = float((found - true).norm() / true.norm())
    if apart > 0.01:
        raise BrokenPromiseError(f"the gradient differs by {apart:.0%} of its length")


def test_a_recurrent_layer_trains_privately_or_is_refused_with_a_reason(digits):
    """A model that [dp] cannot train is refused before the session, by a typed error."""
    torch.manual_seed(0)
    for bottom in (flat(nn.GRU(PIXELS, WIDTH)), Sequence(last=False)):
        end = begun(digits, bottom)
        if end is None:
            continue
        try:
            clipped_sum(end, torch.rand(ROWS, 1, 8, 4), torch.randn(ROWS, WIDTH))
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise BrokenPromiseError(f"a private session begins and crashes: {told}") from None


def test_no_network_of_a_leader_takes_a_whole_table_for_one_row():
    """A worker's gradients move by at most clip for one row, whatever network a leader sends.

    torch takes a table of axes (rows, height, width) for one picture of as many channels.
    """
    torch.manual_seed(0)
    rows, labels = torch.randn(ROWS, 1, 1), torch.randn(ROWS, 1)
    network = nn.Sequential(nn.Conv2d(ROWS, ROWS, 1))
    found = []
    for cell in (0.0, 100.0):
        (owner,) = tensors.virtual("owner")
        table = rows.clone()
        table[0] = cell
        x, y = owner.load(table, tag="x"), owner.load(labels, tag="y")
        for tag in "xy":
            owner.grant(tag, epsilon=1e6)
        training = tensors.PrivateTraining(network, [x], [y], noise=0.01, batch_size=ROWS)
        try:
            training.step()
        except VFLError:
            return
        found.append(torch.cat([one.grad.reshape(-1) for one in network.parameters()]) * ROWS)
    moved = float((found[0] - found[1]).norm())
    if moved > 2.5:  # 2 for another row in its place, and noise of .2 in all
        raise BrokenPromiseError(f"one row moves a worker's gradients by {moved:.1f} x clip")


def noisy(digits, defense, **models):
    """A session with a defense that states an epsilon of one row; None where it is refused."""
    settings = Experiment.model_validate({
        "parties": {name: {"width": WIDTH} for name in ("left", "right")},
        "data": {"rows": 100}, "train": {"epochs": 1, "batch_size": ROWS}, "defense": defense,
    })  # fmt: skip
    try:
        return LocalSession(settings, digits, outputs=10, **models)
    except VFLError:
        return None


def test_noise_on_a_cut_hides_a_row_in_all_cuts(digits):
    """With clipped_noise, a row changes no other row's cut."""
    torch.manual_seed(0)
    session = noisy(digits, "clipped_noise:norm=1,sigma=8", bottoms={"left": Centred()})
    if session is None:
        return
    rows = torch.rand(ROWS, 1, 8, 4)
    bottom = session.clients[0].end.model["bottom"]
    before = bottom(rows)
    rows[0] *= 100
    moved = (bottom(rows) - before).detach()[1:].norm(dim=1)
    if float(moved.max()) > 1e-3:
        told = f"one row moves the cuts of {int((moved > 1e-3).sum())} others"
        raise BrokenPromiseError(f"{told}, each of which is stated alone at epsilon < 1")
