"""The protocols of chapter 6: against plain references, to the byte, and who sees what."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vfl.core.errors import ReusedPadError, RingRangeError, RunFolderError, WidthError
from vfl.llm.material import MaterialStore
from vfl.llm.packing import pack_elements, packed_bytes, unpack_elements
from vfl.llm.private_decoder import gated_silu, mixture, scores_of, softmax
from vfl.llm.two_party import Form, Growing, LocalRoles, Shared
from vfl.llm.weights import LayerShape

MODES = ["fast", "thesis"]
ROWS, INNER, WIDTH = 3, 40, 16
#: Fraction bits and ring of what is shared in these tests, and the bytes of its elements.
BITS, RING, SIZE = 14, 40, 5


def draw(*shape, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=source, dtype=torch.float64)


TABLES = []


class Table(LocalRoles):
    """Three parties; `frames` are the payloads that went between P0 and P1, with their senders."""

    def __init__(self, mode, **form):
        super().__init__(Form(mode, **form), {}, timeout_s=60)
        self.frames = []
        TABLES.append(self)

    def prepare(self, program):
        return self.run(lambda party: party.prepare(program))

    def answer(self, program, material):
        self.frames = []
        for role in (0, 1):
            channel = self.parties[role].channels[1 - role]

            def send(payload, number, phase, role=role, channel=channel):
                self.frames.append((role, bytes(payload)))
                type(channel).send_bytes(channel, payload, number, phase)

            channel.send_bytes = send
        return self.run(lambda party: party.answer(program, material[party.role]), (0, 1))

    def both(self, program):
        return self.answer(program, self.prepare(program))

    def value(self, program):
        """What the two halves that a program gives are together; float64."""
        first, second = self.both(program)
        above = 64 - first.ring
        total = ((first.share + second.share) << above) >> above
        return total.double() * 2.0**-first.bits

    def payloads(self):
        return [(sender, len(payload)) for sender, payload in self.frames]


@pytest.fixture(autouse=True)
def all_closed():
    yield
    while TABLES:
        TABLES.pop().close()


@pytest.fixture
def table(request):
    return Table(getattr(request, "param", "fast"))


both_modes = pytest.mark.parametrize("table", MODES, indirect=True)


def asked(party, values, bits=BITS, ring=RING):
    return party.question(values.shape, values if party.role == 1 else None, bits, ring, "values")


def linear(party, name, weight, bias=None, bits=16):
    own = (weight, bias) if party.role == 0 else ()
    return party.constant(LayerShape(name, tuple(weight.shape), bits), *own)


def constants_of(table, **weights):
    found = [{}, {}, {}]
    for name, (weight, bias, bits) in weights.items():
        for role, one in enumerate(
            table.run(lambda party, w=weight, b=bias, n=bits: linear(party, "layer", w, b, n))
        ):
            found[role][name] = one
    return found


X = draw(ROWS, INNER, seed=1)
W, BIAS = draw(INNER, WIDTH, seed=2, scale=0.2), draw(WIDTH, seed=3)


HEADS, GROUPS, HEAD = 4, 2, 6


FUNCTIONS = {
    "gelu": (F.gelu, "elements", lambda x: F.gelu(x)),
    "softmax": (softmax, "vectors", softmax),
    "norm": (lambda x: F.layer_norm(x, (INNER,)), "vectors", lambda x: F.layer_norm(x, (INNER,))),
    "silu": (gated_silu, "pairs", lambda x: (F.silu(x[0]) * x[1])[None]),
}


@both_modes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(table, name):
    function, kind, reference = FUNCTIONS[name]
    values = draw(2 if kind == "pairs" else ROWS, INNER, seed=5)

    def program(party):
        # 30 fraction bits, as behind a product; P1 looks at 24 bits of the 40.
        x = asked(party, values, bits=30)
        return party.apply(x, function, BITS, RING, "layer", kind)

    found = table.value(program)
    assert found.shape == reference(values).shape
    assert (found - reference(values)).abs().max() < 3e-4
    count, results = values.numel(), reference(values).numel()
    there_and_back = [(0, 3 * count), (1, SIZE * results)]
    if table.parties[0].form.mode == "fast":
        assert table.payloads() == [(1, SIZE * count), *there_and_back]
    else:
        assert table.payloads() == [(1, 4 * count), *there_and_back]
    # Table 6.1: 8 bytes an element in two messages, or 12 in three.
    seen = [leak for leak in table.parties[1].leakage.leaks() if leak.what == "permuted values"]
    assert [leak.elements for leak in seen] == [count]
    assert not table.parties[0].leakage.leaks()


@both_modes
def test_only_as_many_bits_are_shown_as_are_needed(table):
    values = draw(1, 300, seed=6)
    found = table.value(
        lambda party: party.apply(
            asked(party, values, bits=30), torch.tanh, 20, 40, "layer", "elements", 11
        )
    )
    # Of the ring of 40 bits 10 before the point and 11 behind it.
    assert (0, packed_bytes(300, 21)) in table.payloads()
    assert 1e-5 < (found - torch.tanh(values)).abs().max() < 2**-10


@both_modes
@pytest.mark.parametrize("kind", ["elements", "vectors", "pairs"])
def test_what_p1_sees_is_in_another_order_each_time(table, kind):
    values = torch.arange(2 * 36, dtype=torch.float64).reshape(2, 36)
    seen = []

    def look(x):
        seen.append(x.round())
        return x[:1] if kind == "pairs" else x

    program = lambda party: party.apply(  # noqa: E731
        asked(party, values, bits=30), look, BITS, RING, "layer", kind
    )
    for _ in range(2):
        table.value(program)
    first, second = seen
    assert not torch.equal(first, second)
    assert not torch.equal(first, values)
    for each in seen:
        assert torch.equal(each.reshape(-1).sort().values, values.reshape(-1))
        if kind == "vectors":
            assert {tuple(row.sort().values.tolist()) for row in each} == {
                tuple(row.tolist()) for row in values
            }
            # Two vectors have orders of their own.
            inside = [row.argsort().tolist() for row in each]
            assert inside[0] != inside[1]
        if kind == "pairs":
            assert torch.equal(each[1] - each[0], torch.full((36,), 36.0, dtype=torch.float64))


def test_the_order_of_vectors_changes_too():
    orders, values = set(), torch.arange(4 * 3, dtype=torch.float64).reshape(4, 3)
    for _ in range(8):
        table = Table("fast")
        seen = []

        def look(x, seen=seen):
            seen.append(tuple((x.round()[:, 0] // 3).int().tolist()))
            return x

        table.value(
            lambda party, look=look: party.apply(
                asked(party, values, bits=30), look, BITS, RING, "layer", "vectors"
            )
        )
        orders.update(seen)
    assert len(orders) > 2  # of 24; two of eight by chance are (1 / 24)^6


def test_p0_learns_nothing_of_the_query():
    """Each position is in the set half of the time, whether it is asked for or not."""
    table, scores = Table("fast"), torch.zeros(1, 64, dtype=torch.float64)
    scores[0, 17] = 5.0
    inside = []
    for _ in range(60):
        positions = []

        def pick(seen, positions=positions):
            positions.append(int(seen.argmax()))
            return positions[-1]

        table.both(lambda party, pick=pick: party.choose(asked(party, scores, bits=30), pick))
        query = next(
            payload for sender, payload in table.frames if sender == 1 and len(payload) == 8
        )
        inside.append(np.unpackbits(np.frombuffer(query, np.uint8))[positions[0]])
    assert 12 < sum(inside) < 48  # 60 fair coins, 4.6 deviations


def attend(table, steps=2):
    """Steps of attention by `mix`, of the same keys, queries and values each time."""
    made = [
        tuple(draw(heads, 1, HEAD, seed=20 * place + step)
              for place, heads in enumerate((GROUPS, HEADS, GROUPS)))
        for step in range(steps)
    ]  # fmt: skip
    eye = {size: torch.eye(size, dtype=torch.float64) for size in (GROUPS * HEAD, HEADS * HEAD)}
    kept = constants_of(table, **{str(size): (each, None, 0) for size, each in eye.items()})

    def program(party):
        def known(values, ring):
            flat = asked(party, values.reshape(1, -1), 8, ring)
            product = party.multiply(flat, kept[party.role][str(values.numel())])
            return product.map(lambda share: share.reshape(values.shape))

        caches, results = (Growing(), Growing()), []
        for count, step in enumerate(made, 1):
            k, q, v = (known(each, ring) for each, ring in zip(step, (RING, RING, 42), strict=True))
            axes = (HEADS, 1, count)
            scores = party.multiply_growing(caches[0], k, q, scores_of, axes, (caches[1], v))
            flat = scores.map(lambda share, n=count: share.reshape(HEADS, n))
            results.append(party.mix(flat, softmax, 12, "attention", caches[1], v, mixture, 8, 11))
        return results

    table.both(program)


def test_what_a_function_and_a_product_say_is_uniform():
    """The same question over and over: each position of each message takes every value."""
    seen = {}
    with Table("fast") as table:
        for _ in range(25):
            attend(table)
            for place, (_, payload) in enumerate(table.frames):
                seen.setdefault(place, []).append(np.frombuffer(payload, np.uint8)[:-1])
    for payloads in seen.values():
        bits = np.unpackbits(np.stack(payloads), axis=1)
        assert abs(bits.mean(0) - 0.5).max() < 5.5 * 0.5 / len(payloads) ** 0.5
        assert abs(bits.mean() - 0.5) < 5.5 * 0.5 / bits.size**0.5


@both_modes
def test_what_is_said_online_is_uniform(table):
    """Of a question that is one number over and over; both ways."""
    values = torch.full((1, 20_000), 1.5, dtype=torch.float64)
    table.value(
        lambda party: party.apply(
            asked(party, values, bits=30), torch.relu, BITS, RING, "layer", "elements"
        )
    )
    assert {sender for sender, _ in table.frames} == {0, 1}
    for _, payload in table.frames:
        counts = np.bincount(np.frombuffer(payload, np.uint8), minlength=256)
        expected = len(payload) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5


def test_low_bits_are_dropped_without_a_wrap():
    z = torch.randint(-(2**50), 2**50, (100_000,), generator=torch.Generator().manual_seed(0))
    first = torch.randint(-(2**63), 2**63 - 1, z.shape, generator=torch.Generator().manual_seed(1))
    one, two = (Shared(each, 30, 64).dropped(12) for each in (first, z - first))
    assert (one.bits, one.ring) == (18, 52)
    total = ((one.share + two.share) << 12) >> 12
    assert ((z >> 12) - total).abs().max() <= 1


@pytest.mark.parametrize(("bits", "low"), [(64, 0), (40, 0), (34, 0), (24, 16), (21, 13), (1, 0)])
def test_elements_on_the_wire(bits, low):
    elements = torch.randint(-(2**62), 2**62, (51,), generator=torch.Generator().manual_seed(0))
    payload = pack_elements(elements, bits, low)
    assert len(payload) == packed_bytes(51, bits)
    kept = [int(each) >> low for each in elements]
    back = [int(each) >> low for each in unpack_elements(payload, 51, bits, low)]
    assert [each % 2**bits for each in back] == [each % 2**bits for each in kept]
    # The same by Python's whole numbers: the lowest bit first.
    whole = sum((each % 2**bits) << (place * bits) for place, each in enumerate(kept))
    assert bytes(payload) == whole.to_bytes(len(payload), "little")


def test_values_beyond_the_range_are_refused_where_they_are_seen():
    table = Table("fast")
    values = torch.full((1, 40), 0.25, dtype=torch.float64)
    values[0, 3] = 400.0
    with pytest.raises(RingRangeError, match="layer 7") as raised:
        table.value(
            lambda party: party.apply(
                asked(party, values, bits=30), torch.relu, BITS, RING, "layer 7", "elements"
            )
        )
    assert "400" not in str(raised.value)


def test_few_values_are_not_hidden():
    with pytest.raises(WidthError, match="hide"):
        Table("fast").value(
            lambda party: party.apply(
                asked(party, X[:1, :5]), torch.relu, BITS, RING, "x", "elements"
            )
        )


@both_modes
def test_material_is_of_one_program(table):
    program = lambda party: party.multiply(asked(party, X), kept[party.role]["one"])  # noqa: E731
    kept = constants_of(table, one=(W, None, 16))
    material = table.prepare(program)
    with pytest.raises(ReusedPadError):
        table.answer(lambda party: (program(party), program(party)), material)


def test_material_is_used_once_also_after_a_restart(tmp_path):
    material = [torch.arange(5), torch.ones(2, 3, dtype=torch.int64)]
    store = MaterialStore(tmp_path / "P1", "P1", "model")
    store.put("a", material)
    store.put("b", material)
    assert all(torch.equal(x, y) for x, y in zip(store.take("a"), material, strict=True))
    for again in (store, MaterialStore(tmp_path / "P1", "P1", "model")):
        with pytest.raises(ReusedPadError, match="used before"):
            again.take("a")
        with pytest.raises(ReusedPadError, match="dealt before"):
            again.put("a", material)
        assert again.names() == ["b"]
    for name in ("c", "../P1/b"):
        with pytest.raises(ReusedPadError, match="never dealt"):
            store.take(name)
    assert len(list(MaterialStore(tmp_path / "P1", "P1", "model").take("b"))) == 2


def test_material_whose_taker_was_killed_stays_used(tmp_path, monkeypatch):
    """Between the mark and the end of `take`: the content may be left, and is not given."""
    store = MaterialStore(tmp_path, "P1", "model")
    store.put("a", [torch.arange(5)])
    monkeypatch.setattr(
        "pathlib.Path.unlink", lambda self, **_: (_ for _ in ()).throw(OSError("no"))
    )
    with pytest.raises(OSError, match="no"):
        store.take("a")
    monkeypatch.undo()
    again = MaterialStore(tmp_path, "P1", "model")
    assert again.names() == []
    with pytest.raises(ReusedPadError):
        again.take("a")
    assert not list(tmp_path.glob("*.material"))


def test_material_is_private_and_of_its_weights(tmp_path):
    store = MaterialStore(tmp_path / "new", "P1", "model")
    store.put("a", [torch.arange(5)])
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
    with pytest.raises(RunFolderError):
        MaterialStore(tmp_path / "new", "P1", "other").take("a")
