"""What a frame of randomised top-k tells about which of its indices were drawn at random.

Nothing but the values it stands for: that is exact, and a guesser shows it once more.
"""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from vfl.compression import StepContext, make
from vfl.core.seeds import Secret, generator

SECRET = Secret.of_simulation(0, "feature")
WIDTH, K = 16, 4


def normal_cut(step, rows):
    return torch.randn(rows, WIDTH, generator=generator(step, "secrecy"))


def with_ties(step, rows):
    """Few levels, none of them zero."""
    return normal_cut(step, rows).round() + 0.5


@pytest.mark.parametrize("law", ["sequential", "multinomial"])
@pytest.mark.parametrize("made", [normal_cut, with_ties])
@pytest.mark.parametrize(
    "format_",
    ["", ",packer=index", ",packer=bitmap", ",values=4", ",values=8,scale=row,packer=range"],
)
def test_a_frame_is_what_plain_top_k_makes_of_the_kept_values(format_, made, law):
    """So its order, its length and what an adaptive packer learned follow from those alone."""
    random = make(f"randtopk:k={K},alpha=0.4,law={law}{format_}")
    plain = make(f"topk:k={K}{format_}")
    for step in range(4):
        cut = made(step, 50)
        payload, indices = random.encode(cut, StepContext(step, training=True, secret=SECRET))
        kept = torch.zeros_like(cut).scatter(1, indices, cut.gather(1, indices))
        assert plain.encode(kept, StepContext(step, training=True)).payload == payload
        random.commit(step)
        plain.commit(step)


@pytest.mark.parametrize("packer", ["enumerative", "index", "bitmap"])
def test_the_length_of_a_fixed_packer_never_varies(packer):
    codec = make(f"randtopk:k={K},alpha=0.4,values=4,packer={packer}")
    sizes = {
        len(codec.encode(made(step, 30), StepContext(step, training=True, secret=SECRET)).payload)
        for step in range(20)
        for made in (normal_cut, with_ties, lambda step, rows: torch.zeros(rows, WIDTH))
    }
    assert len(sizes) == 1


def sparse(step, rows):
    """Mostly zeros, fewer above zero than travel."""
    return (normal_cut(step, rows) - 1).relu()


def seen(made, steps, rows):
    """Magnitudes of what frames hold, where it stands in them, and which was drawn at random."""
    codec, same = make(f"randtopk:k={K},alpha=0.3"), make(f"randtopk:k={K},alpha=0")
    sizes, orders, drawn = [], [], []
    for step in range(steps):
        cut, context = made(step, rows), StepContext(step, training=True, secret=SECRET)
        top, indices = same.encode(cut, context).saved, codec.encode(cut, context).saved
        sizes.append(cut.gather(1, indices).abs().numpy())
        orders.append(indices.numpy())
        drawn.append(~(indices[:, :, None] == top[:, None, :]).any(dim=2).numpy())
    return tuple(np.concatenate(each) for each in (sizes, orders, drawn))


def magnitudes(sizes):
    """Each magnitude, its logarithm, its rank in the row and how far it is from the others."""
    rank = sizes.argsort(axis=1).argsort(axis=1)
    sizes = sizes + 1e-3
    gaps = [sizes - sizes.mean(axis=1, keepdims=True), sizes / sizes.max(axis=1, keepdims=True)]
    one_hot = [rank == value for value in range(K)]
    return np.stack([sizes, sizes**2, np.log(sizes), *gaps, *one_hot], axis=2)


def frame_features(indices, orders):
    """Also the order in the frame, and the indices themselves."""
    one_hot = [orders == position for position in range(K)]
    near = [indices == place for place in range(WIDTH)]
    return np.stack([*one_hot, *near], axis=2)


def losses(features, drawn):
    """Held-out log loss of each row for a guesser that learned on the first half of the rows."""
    half = len(drawn) // 2
    flat = features.reshape(-1, features.shape[2]).astype(float)
    model = LogisticRegression(max_iter=2000, C=10.0)
    model.fit(flat[: half * K], drawn[:half].reshape(-1))
    guess = model.predict_proba(flat[half * K :])[:, 1].reshape(-1, K)
    return -np.log(np.where(drawn[half:], guess, 1 - guess)).sum(axis=1)


def gain(before, after):
    """By how many standard errors a guesser is better than another."""
    saved = before - after
    return saved.mean() / (saved.std() / np.sqrt(len(saved)))


@pytest.mark.parametrize("made", [normal_cut, with_ties, sparse])
def test_a_guesser_that_sees_the_frame_knows_no_more_than_the_magnitudes_tell(made):
    sizes, indices, drawn = seen(made, steps=20, rows=400)
    own = magnitudes(sizes)
    alone = losses(own, drawn)
    constant = losses(np.ones((*drawn.shape, 1)), drawn)
    assert gain(constant, alone) > 10  # small values are likelier to have been drawn
    positions = np.broadcast_to(np.arange(K), drawn.shape)
    told = np.concatenate([own, frame_features(indices, positions)], axis=2)
    assert gain(alone, losses(told, drawn)) < 3
    # The same guesser finds out a frame that wrote what it drew behind the others.
    leaking = drawn.argsort(axis=1, kind="stable").argsort(axis=1)
    told = np.concatenate([own, frame_features(indices, leaking)], axis=2)
    assert gain(alone, losses(told, drawn)) > 10


def test_of_equal_magnitudes_any_may_count_as_top():
    """alpha = 0 draws nothing else; each of six equal indices is taken by half of the rows."""
    cut = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0]]).expand(4000, 8)
    indices = (
        make("randtopk:k=4,alpha=0").encode(cut, StepContext(1, training=True, secret=SECRET)).saved
    )
    shares = torch.zeros(4000, 8).scatter(1, indices, 1.0).mean(dim=0)
    assert shares.tolist() == pytest.approx([0.5, 1, 0.5, 0.5, 0, 0.5, 0.5, 0.5], abs=0.04)
