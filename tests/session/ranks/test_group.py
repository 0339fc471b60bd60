"""Ranks of one party as threads of one process: what they exchange, and what they refuse."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from vfl.compression import StepContext, make
from vfl.core.errors import LostRankError, SpecError, VFLError
from vfl.core.frame import Frame, Kind
from vfl.core.seeds import Secret
from vfl.core.traffic import Ledger
from vfl.session.ranks.group import Ranks, fit
from vfl.session.ranks.processes import device_of


def in_ranks(size, play, timeout_s=20.0):
    """What `play(ranks)` gave at each rank; the first error of any of them is raised."""
    store, found, errors = distributed.HashStore(), [None] * size, []

    def run(rank):
        try:
            found[rank] = play(Ranks.join_group("bank", rank, size, store, timeout_s))
        except VFLError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    if errors:
        raise errors[0]
    return found


@pytest.mark.parametrize("rows", [7, 6, 2])
def test_outputs_come_together_in_the_order_of_the_batch(rows):
    values = torch.arange(2.0 * rows).reshape(rows, 2)

    def play(ranks):
        mine = torch.tensor_split(values, 3)[ranks.rank]
        return ranks.whole(mine, float(len(mine)), rows)

    for outputs, loss in in_ranks(3, play):
        assert torch.equal(outputs, values)
        assert loss == rows


def test_a_state_is_spread_from_rank_0():
    state = {"weights": torch.arange(3.0), "best": None, "steps": [1, 2], "run": {"name": "x"}}

    def play(ranks):
        return ranks.spread(state if ranks.rank == 0 else {"weights": torch.zeros(1)})

    for found in in_ranks(2, play):
        assert torch.equal(found["weights"], state["weights"])
        assert {**found, "weights": None} == {**state, "weights": None}


def test_gradients_are_summed_and_a_weight_without_one_stays_without():
    def play(ranks):
        used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        built = ranks.together(lambda weights: torch.optim.SGD(weights, lr=1.0))([used, unused])
        if ranks.rank == 1:  # rank 0 has none of its own
            used.grad = torch.tensor([1.0, 2.0])
        built.step()
        return used.detach(), unused.grad

    for used, unused in in_ranks(2, play):
        assert torch.equal(used, torch.tensor([-1.0, -2.0]))
        assert unused is None


def test_the_frames_of_all_ranks_are_counted_once():
    def play(ranks):
        ledger = Ledger()
        for _ in range(2):
            ledger("shop", "up", Frame(Kind.CUT, 0, bytes(10 + ranks.rank)))
            ranks.merge(ledger, ["shop"])
        return ledger

    first, second = in_ranks(2, play)
    (row,) = first.rows()
    assert (row.frames, row.payload_bytes) == (4, 42)
    assert second.rows() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_the_loopback_alone():
    before = listening()

    def play(ranks):
        ranks.count_at_first([1])
        found = listening() - before
        ranks.count_at_first([1])
        return found

    for opened in in_ranks(2, play):
        assert opened
        assert {address for address, _ in opened} == {"0100007F"}


def listening():
    """Address and port, as hex, of every socket of this process that listens."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if alive(fd)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(tuple(fields[1].split(":")))
    return found


def alive(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_rank_that_is_silent_is_lost():
    def play(ranks):
        if ranks.rank == 0:
            ranks.count_at_first([1])

    with pytest.raises(LostRankError, match="a rank of party 'bank' was lost"):
        in_ranks(2, play, timeout_s=1.0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4),
        nn.Dropout(0.5),
        nn.GRU(4, 4, dropout=0.1, num_layers=2),
        nn.RNN(4, 4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_that_looks_at_other_rows_or_draws_is_refused(layer):
    model = nn.ModuleDict({"bottom": nn.Sequential(nn.Linear(4, 4), layer)})
    with pytest.raises(SpecError, match="2 ranks would train this model differently") as caught:
        fit(model, Ranks("bank", 0, 2))
    assert type(layer).__name__ in str(caught.value)
    fit(model, Ranks())


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d, (7, 5)), (nn.BatchNorm2d, (7, 5, 3, 2))]
)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_over_the_rows_of_all_ranks(norm, shape, affine):
    generator = torch.Generator().manual_seed(0)
    inputs, back = 3 + 2 * torch.randn(2, *shape, generator=generator)
    one, whole = norm(shape[1], affine=affine), inputs.clone().requires_grad_()
    wanted = one(whole)
    wanted.backward(back)

    def play(ranks):
        mine = norm(shape[1], affine=affine)
        fit(nn.Sequential(mine), ranks)
        share, grad = (torch.tensor_split(one, 3)[ranks.rank] for one in (inputs, back))
        share = share.clone().requires_grad_()
        outputs = mine(share)
        outputs.backward(grad)
        of_weights = [ranks.total(weight.grad) for weight in mine.parameters()]
        asked = mine.eval()(inputs)
        return outputs.detach(), share.grad, of_weights, dict(mine.state_dict()), asked

    outputs, grads, of_weights, states, asked = zip(*in_ranks(3, play), strict=True)
    torch.testing.assert_close(torch.cat(outputs), wanted)
    torch.testing.assert_close(torch.cat(grads), whole.grad)
    for rank in range(3):
        torch.testing.assert_close(of_weights[rank], [weight.grad for weight in one.parameters()])
        torch.testing.assert_close(states[rank], dict(one.state_dict()))
        torch.testing.assert_close(asked[rank], one.eval()(inputs))


def test_a_card_a_rank():
    assert [device_of("cuda", rank) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert device_of("cpu", 1) == "cpu"


def _rows_apart():
    specs = ["none", "topk:k=2", "randtopk:k=2", "quantise", "relu", "l1", "size:k=2", "sign"]
    specs += ["rate", "topk:k=2,values=8", "topk:k=2,values=8,scale=row"]
    specs += ["quantise:values=bf16", "quantise:values=4,scale=row", "topk:k=2,grad=4"]
    return [spec for spec in specs if make(spec).rows_apart and not make(spec).draws]


@pytest.mark.parametrize("spec", _rows_apart())
def test_a_codec_that_keeps_rows_apart_gives_shares_the_same_values(spec):
    generator = torch.Generator().manual_seed(0)
    width = make(spec).wire_width(8)
    cut, grad = torch.randn(2, 6, width, generator=generator)
    context = StepContext(3, training=True, secret=Secret.of_simulation(0, "bank"))

    def crossed(rows):
        ends = make(spec), make(spec)
        payload, kept = ends[0].encode(cut[rows], context)
        decoded, saved = ends[1].decode(payload, len(cut[rows]), width, context)
        back = ends[1].encode_grad(grad[rows], saved, context)
        return decoded, ends[0].decode_grad(back, kept, len(cut[rows]), width, context)

    whole = crossed(slice(None))
    shares = zip(crossed(slice(0, 2)), crossed(slice(2, None)), strict=True)
    for one, parts in zip(whole, shares, strict=True):
        assert torch.equal(one, torch.cat(parts))


def test_scales_of_a_batch_and_rounding_at_random_keep_no_rows_apart():
    kept = _rows_apart()
    assert {"none", "topk:k=2,values=8,scale=row", "quantise:values=bf16"} <= set(kept)
    assert not {"quantise", "topk:k=2,values=8", "topk:k=2,grad=4"} & set(kept)
