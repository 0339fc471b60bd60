"""Attacks on a training that `vfl.record` recorded, and what it takes to be recorded."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vfl
from vfl.core.errors import DataError, SpecError, UserError
from vfl.training.fitting import fit, row_digests

ROWS, WIDTH, COLUMNS = 240, 8, 6
QUICK = {"draws": 1, "leaks": [5], "baselines": ["raw"], "progress": False}


def rows():
    """Two classes that overlap, one of them rare, as norms of gradients tell them apart."""
    draw = torch.Generator().manual_seed(0)
    labels = (torch.arange(ROWS) % 6 == 0).long()
    inputs = torch.randn(ROWS, COLUMNS, generator=draw) + labels[:, None]
    return inputs, labels


def module(codec="none", joined=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    if joined:
        return vfl.SplitModule({"feature": net[:2]}, net[2:], {"feature": WIDTH}, codec=codec)
    return vfl.split(net, "1", torch.zeros(2, COLUMNS), codec=codec)


def loader():
    return DataLoader(TensorDataset(*rows()), 40, shuffle=True)


def recorded(model, epochs=2, limit_bytes=2**31):
    torch.manual_seed(1)
    with vfl.record(model, limit_bytes) as trace:
        fit(model, loader(), epochs=epochs, learning_rate=0.01)
    return trace


@pytest.mark.parametrize("joined", [False, True], ids=["split", "SplitModule"])
def test_gradients_tell_the_rare_class(joined):
    model = module(joined=joined)
    pack = ["gradient_norm:epochs=5", "gradient_direction", "logistic"]
    table = vfl.attack(model, loader(), pack=pack, trace=recorded(model, 5), **QUICK).table
    found = table[table.measure == "auc"].set_index("subject")
    assert (found.value[pack[:2]] > 0.95).all()
    assert found.access.to_dict() == dict(zip(pack, ["gradients", "gradients", "cut"], strict=True))
    assert (found.guess == 0.5).all()


@pytest.mark.parametrize("codec", ["none", "topk:k=3", "quantise:values=4,packer=range"])
def test_frames_decode_to_what_the_module_received(codec):
    """Decoded again from bytes: gradients as they reached the bottom, of the rows they had."""
    model, seen = module(codec), {}

    def watch(end, _, cut):
        step = model.step
        if cut.requires_grad:
            cut.register_hook(lambda grad: seen.update({step: grad.clone()}))

    model.encoders["feature"].register_forward_hook(watch)
    trace = recorded(model)
    inputs, _ = rows()
    digests = list(row_digests([inputs]))
    decoded = trace.decoded("feature", digests)
    grads = {frame.step: (frame, values) for frame, values in decoded if frame.direction == "down"}
    assert set(grads) == set(seen)
    for step, (frame, values) in grads.items():
        assert torch.equal(values, seen[step])
        assert frame.epoch == 1 + step // 6
    one_epoch = torch.cat([torch.from_numpy(grads[step][0].rows) for step in range(6)])
    assert one_epoch.sort().values.tolist() == list(range(ROWS))


def test_nothing_of_evaluations_copies_or_later_steps_is_recorded():
    model = module()
    inputs, labels = rows()
    with vfl.record(model) as trace:
        average = copy.deepcopy(model)
        average(inputs)
        model.eval()(inputs)
        model.train()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        model(inputs)  # no backward pass
    nn.functional.cross_entropy(model(inputs), labels).backward()
    assert [one.step for one in trace.frames] == [0, 0, 1]
    assert len(trace.decoded("feature", list(row_digests([inputs])))) == 2


def test_rows_that_are_drawn_anew_are_known_by_their_positions():
    inputs, labels = rows()
    model, draw = module(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with vfl.record(model) as trace:
        for _ in range(3):
            for batch in torch.randperm(ROWS, generator=draw).split(40):
                noisy = inputs[batch] + 0.1 * torch.randn(len(batch), COLUMNS, generator=draw)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(noisy, rows=batch), labels[batch]).backward()
                optimizer.step()
    batch = {"input": inputs, "labels": labels, "rows": torch.arange(ROWS)}
    asked = {"pack": "gradient_direction", "trace": trace, **QUICK}
    table = vfl.attack(model, [batch], **asked).table
    assert table[table.measure == "auc"].value.item() > 0.95
    with pytest.raises(DataError, match="none of the loader's rows") as caught:
        vfl.attack(model, [(inputs, labels)], **asked)
    assert "rows=" in caught.value.fix


def test_a_trace_of_another_module_is_refused():
    model, asked = module(), {"pack": "gradient_direction", **QUICK}
    trace = recorded(model)
    other = module()
    with pytest.raises(DataError, match="another module's training") as caught:
        vfl.attack(other, loader(), trace=trace, **asked)
    assert "final weights" in caught.value.want
    other.load_state_dict(model.state_dict())
    for own in (other, copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)):
        assert len(vfl.attack(own, loader(), trace=trace, **asked).table)


def test_what_is_not_there_is_refused():
    model = module()
    with pytest.raises(UserError, match="needs a recorded training") as caught:
        vfl.attack(model, loader(), pack="gradient_norm", **QUICK)
    assert "vfl.record" in caught.value.fix
    trace = recorded(model)
    with pytest.raises(UserError, match="needs evidence that no single party"):
        vfl.attack(model, loader(), pack="membership", trace=trace, **QUICK)
    with pytest.raises(Exception, match="the trace is full"):
        recorded(module(), limit_bytes=1000)
    tokens = vfl.split(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "0", torch.zeros(2, 3, 4), row_axes=2
    )
    with pytest.raises(SpecError, match="these rows are tokens"), vfl.record(tokens):
        pass
