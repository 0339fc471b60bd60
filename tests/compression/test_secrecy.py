"""What a frame of randomised top-k tells about which of its indices were drawn at random.

Nothing but the values it stands for: that is exact, and a guesser shows it once more.
"""

import pytest
import torch

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


def test_of_equal_magnitudes_any_may_count_as_top():
    """alpha = 0 draws nothing else; each of six equal indices is taken by half of the rows."""
    cut = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0]]).expand(4000, 8)
    indices = (
        make("randtopk:k=4,alpha=0").encode(cut, StepContext(1, training=True, secret=SECRET)).saved
    )
    shares = torch.zeros(4000, 8).scatter(1, indices, 1.0).mean(dim=0)
    assert shares.tolist() == pytest.approx([0.5, 1, 0.5, 0.5, 0, 0.5, 0.5, 0.5], abs=0.04)
