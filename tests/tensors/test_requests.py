"""What a leader asks of a worker: every number has a range, and the worker keeps to it."""

import math

import pytest
import torch
from pydantic import TypeAdapter

from vfl.core.errors import UserError, VFLError
from vfl.tensors.keys import seal
from vfl.tensors.pointers import Ref
from vfl.tensors.requests import MAPS, REQUESTS, STEPS, Contents
from vfl.tensors.wire import packed
from vfl.tensors.workers import Worker

REFUSED = "does not accept this argument"
ONE, KEY = torch.ones(2, 3), b"0" * 32
STEP = {
    "plan": "p", "layers": [["linear", [3, 1], True], ["conv2d", [1, 2, (3, 3), 1, 1], False]],
    "loss": "mse", "clip": 1.0, "noise": 4.0, "rate": 0.5,
    "inputs": Ref(1), "labels": Ref(1), "weights": [Ref(1), ONE],
}  # fmt: skip
#: Arguments that pass, of every request with a number.
GOOD = {
    "run": ("torch.add", [Ref(1), 2], {"alpha": 3}),
    "read": (1,), "note": (1,), "require_grad": (1, False), "gradient": (1,),
    "set_gradient": (1, 2), "backward": (1,), "forget": ([999],), "pack": (1, "bob", KEY),
    "split": (1, 16, [KEY, KEY]), "masked": (1, 2, 16, [KEY, KEY]),
    "sit": ("s", 0, 2, False, [["a", KEY], ["b", KEY], ["c", KEY]]),
    "perform": ("s", "clone", [1], []), "private_step": (STEP,), "vote": ("t", ONE, 2.0),
    "tally": ([1], 0.0), "age": (0,),
}  # fmt: skip
#: Parameters that pass, of every step with a number.
GOOD_STEPS = {
    "divide": [16], "blank": [[2, 3]], "mask": [[2, 3], None],
    "scale": [5], "reshape": [[3, 2]], "expand": [[4, 2, 3]], "sum_to": [[1, 3]],
    "spread": [torch.zeros(2).long(), [2, 3]], "sum": [[0, 1], True], "pad": [[1, 1, 0, 2]],
    "stack": [-1], "cat": [0], "leading": [0, 30],
    "product": ["conv2d", [1, 1, 3, 3, 1, 1, 2, 2, 1, 1, 0, 0, 1, 1, 1]],
    "by": [ONE, "conv2d", False, [1, 1, 3, 3, 1, 1, 2, 2, 1, 1, 0, 0, 1, 1, 1]],
}  # fmt: skip
WHOLE = (-(2**70), 2**70, 1.5, math.nan, math.inf, True, "7", None, [1])
REAL = (-1e300, 1e300, 2**70, math.nan, math.inf, True, "7", None)


def numbers(node, models, name):
    """The numbers of a schema by name, each with its schema; "?" behind what may be anything."""
    if "$ref" in node:
        node = models[node["$ref"].rpartition("/")[2]]
    parts = dict(node.get("properties", {}))
    lists = [*node.get("anyOf", ()), *node.get("prefixItems", ())]
    lists += [
        node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)
    ]
    parts |= {str(at): each for at, each in enumerate(lists)}
    if node.get("type") in ("integer", "number"):
        yield name, node
    elif not parts and "type" not in node and not {"const", "enum"} & node.keys():
        yield f"{name}?", node
    for inside, content in parts.items():
        yield from numbers(content, models, f"{name}.{inside}")


def numbers_of(tables):
    for name, adapter in tables.items():
        schema = adapter.json_schema()
        yield from numbers(schema, schema.get("$defs", {}), name)


def unbounded(tables):
    sides = [("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")]
    return {
        name
        for name, node in numbers_of(tables)
        if not name.endswith(".self?") and not all(node.keys() & set(side) for side in sides)
    }


def test_every_number_of_a_request_has_a_least_and_a_most():
    assert unbounded({**REQUESTS, **STEPS, **MAPS, "parcel": TypeAdapter(Contents)}) == set()

    def careless(number: int, factors: list[float], rest):
        """A request without ranges."""

    made = unbounded({"careless": TypeAdapter(careless)})
    assert made == {"careless.number", "careless.factors.0", "careless.rest?"}


def test_every_request_with_a_number_is_attacked():
    asked = {name.partition(".")[0] for name, _ in numbers_of(REQUESTS) if ".self?" not in name}
    assert asked | {"run"} == set(GOOD)
    steps = {name.partition(".")[0] for name, _ in numbers_of({**STEPS, **MAPS})}
    assert steps == set(GOOD_STEPS)


def spoiled(value, bad):
    """The same with another thing in the place of one number, for every number and every thing."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from ({**value, key: other} for other in spoiled(each, bad))
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from (
                type(value)([*value[:at], other, *value[at + 1 :]]) for other in spoiled(each, bad)
            )
    elif isinstance(value, Ref):
        yield from (Ref(number) for number in (-1, 0, 2**70))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from bad[type(value)]


def accepted(worker, what, args):
    """Whether the worker takes the arguments, whatever it then says to them."""
    try:
        getattr(worker, what)(*args)
    except UserError as error:
        return REFUSED not in str(error)
    except VFLError:
        return True
    return True


@pytest.mark.parametrize("what", sorted(set(GOOD) - {"run"}))
def test_a_worker_takes_no_number_out_of_range(what):
    worker = Worker("alice")
    assert accepted(worker, what, GOOD[what])
    tried = list(spoiled(GOOD[what], {int: WHOLE, float: REAL}))
    if what == "private_step":  # a layer has lists, and flags
        tried = [each for each in tried if each[0]["layers"] == STEP["layers"]]
        tried += [({**STEP, "layers": [["linear", [bad, 1], True]]},) for bad in (-1, 2**70, 0.5)]
    if what == "set_gradient":
        tried.remove((1, None))
    assert len(tried) >= 6
    assert [args for args in tried if accepted(worker, what, args)] == []


@pytest.mark.parametrize("name", sorted(GOOD_STEPS))
def test_a_step_on_shares_takes_no_number_out_of_range(name):
    worker = Worker("alice")

    def asked(parameters):
        kind, front = ("linear", [name]) if name in MAPS else (name, [])
        return accepted(worker, "perform", ("s", kind, [1], [*front, *parameters]))

    assert asked(GOOD_STEPS[name])
    assert [bad for bad in spoiled(GOOD_STEPS[name], {int: WHOLE}) if asked(bad)] == []
    assert not asked([])


def test_axes_of_more_elements_than_a_worker_holds_are_refused():
    for sizes in ([1 << 20, 1 << 20], [1] * 17, [-1]):
        assert not accepted(Worker("alice"), "perform", ("s", "blank", [], [sizes]))


@pytest.mark.parametrize(
    "args",
    [
        [Ref(1), 2**70], [Ref(1), -(2**70)], [Ref(2**70)], [Ref(1), [[2**64]]],
        [Ref(1), slice(0, 2**70)], [Ref(1), [[[[[[[[[[1]]]]]]]]]]],
    ],
)  # fmt: skip
def test_operands_of_an_operation_are_of_64_bits(args):
    worker = Worker("alice")
    worker.store(ONE)
    assert accepted(worker, "run", GOOD["run"])
    assert not accepted(worker, "run", ("torch.add", args, {}))
    assert not accepted(worker, "run", ("torch.add", [Ref(1)], {"alpha": args[1:] or 2**70}))


@pytest.mark.parametrize("sigma", [math.nan, -1.0, 1e300, True, "7", 2.0])
def test_votes_of_another_worker_have_noise_in_its_range(sigma):
    worker = Worker("alice")
    content = {"value": torch.eye(2).long(), "readers": ["alice"], "votes": [sigma, KEY]}
    assert accepted(worker, "accept", (seal(worker.keys.public, packed(content)),)) == (sigma == 2)


@pytest.mark.parametrize("step", ["linear", "exec", "negativ"])
def test_a_step_that_no_worker_knows_is_refused(step):
    with pytest.raises(UserError, match="no worker knows"):
        Worker("alice").perform("s", step, [1], ["eval", 1])


def test_workers_of_every_kind_refuse_alike_and_show_nothing(any_workers):
    alice = any_workers[0]
    number, _ = alice.store(ONE)
    for what, args, where in [
        ("split", (number, 2**70, [KEY, KEY]), "split at alice: bits"),
        ("split", (number, "secret words", [KEY, KEY]), "split at alice: bits"),
        ("note", (ONE * 4711,), "note at alice: number"),
        ("tally", ([number], math.nan), "tally at alice: threshold"),
        ("vote", ("tag", ONE, 0.0), "vote at alice: sigma"),
        ("perform", ("s", "linear", [number], ["expand", [-5]]), "perform at alice: expand: 0.0"),
        ("sit", ("s", 9, 2, False, [["a", KEY]] * 3), "sit at alice: role"),
        ("private_step", ({"inputs": 1, "weights": []},), "private_step at alice: request.plan"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=REFUSED) as caught:
            getattr(alice, what)(*args)
        assert caught.value.where.startswith(where)
        assert caught.value.want
        assert caught.value.fix
        assert "4711" not in str(caught.value)
        assert "secret" not in str(caught.value)
    assert alice.read(number).equal(ONE)  # it goes on
