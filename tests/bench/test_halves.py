import pytest
import torch
from torch import nn

from vfl.bench.halves import fresh_bottom, fresh_top, synthetic
from vfl.bench.messages import Job
from vfl.bench.paths import monolith
from vfl.bench.setup import Setup
from vfl.bench.workloads import FEATURE_PARTIES, LABEL_PARTY, WORKLOADS


def parameters(module):
    return sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize(("name", "width"), [("mlp_small", 128), ("mlp", 1280)])
def test_the_mlp_has_the_sizes_it_names(name, width):
    workload = WORKLOADS[name]
    bottom = 11 * 128 + 129 * 128 + 129 * width
    assert parameters(fresh_bottom(workload, 0, "left")) == bottom
    assert parameters(fresh_top(workload, 0)) == (2 * width + 1) * 64 + 65 * 2


def test_rows_and_weights_follow_from_the_seed():
    workload = WORKLOADS["mlp_small"]
    first, again, other = (synthetic(workload, seed) for seed in (1, 1, 2))
    assert torch.equal(first["left"].inputs, again["left"].inputs)
    assert not torch.equal(first["left"].inputs, other["left"].inputs)
    assert not torch.equal(first["left"].inputs, first["right"].inputs)
    left, right = (fresh_bottom(workload, 1, name).state_dict() for name in FEATURE_PARTIES)
    assert not torch.equal(left["1.weight"], right["1.weight"])


def test_each_party_holds_only_its_own():
    parties = synthetic(WORKLOADS["cnn"], 0)
    assert parties[LABEL_PARTY].inputs is None
    for name in FEATURE_PARTIES:
        assert parties[name].labels is None
        assert tuple(parties[name].inputs.shape[1:]) == (1, 28, 14)


def test_the_monolith_is_plain_gradient_descent_with_momentum():
    torch.set_num_threads(1)
    job = Job(role="monolith", workload="mlp_small", seed=3, warmup_steps=1, steps=4)
    reported = monolith(Setup(job)).final_loss

    setup = Setup(job)
    halves = [*setup.bottoms().values(), setup.top()]
    weights = [value for half in halves for value in half.parameters()]
    speeds = [torch.zeros_like(value) for value in weights]
    losses = []
    for exchange in setup.schedule():
        rows = torch.from_numpy(exchange.rows)
        cuts = [
            half(setup.data[name].inputs[rows])
            for half, name in zip(halves, FEATURE_PARTIES, strict=False)
        ]
        logits = halves[-1](torch.cat(cuts, dim=1))
        loss = nn.functional.cross_entropy(logits, setup.data[LABEL_PARTY].labels[rows])
        losses.append(loss.item())
        for value, speed, grad in zip(
            weights, speeds, torch.autograd.grad(loss, weights), strict=True
        ):
            speed.mul_(0.9).add_(grad)
            value.data.sub_(0.05 * speed)
    assert reported == pytest.approx(sum(losses) / len(losses), rel=1e-5)
