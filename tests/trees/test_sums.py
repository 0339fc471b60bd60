"""Sums on shares against the same sums in one place, and what each party sees of them."""

import queue

import numpy as np
import pytest
import torch

from vfl.core.errors import ProtocolError
from vfl.mpc.channel import Channel
from vfl.mpc.in_process import LocalParties
from vfl.trees import sums
from vfl.trees.newton import family, fit, local_sums, outcome_of
from vfl.trees.sums import Masked, Summing, coarse_bits, fine_bits, largest_frame

ROWS, COLUMNS = 700, (3, 2, 4)


def table(seed=0):
    """Standardised columns, the last holder's first one of ones, and a margin a row."""
    draw = np.random.default_rng(seed)
    inputs = draw.normal(size=(ROWS, sum(COLUMNS))) @ draw.normal(size=(sum(COLUMNS),) * 2)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    inputs[:, 5] = 1
    return inputs, inputs @ draw.normal(size=sum(COLUMNS)) / 4, draw


def parts_of(inputs):
    ends = np.cumsum(COLUMNS)
    return [torch.from_numpy(one) for one in np.split(inputs, ends[:-1], axis=1)]


def played(program):
    with LocalParties(lambda role, links: Summing(role, links, ROWS, COLUMNS), 20, 4) as parties:
        parties.agree({})
        return parties.run(program), parties


def test_sums_of_columns_and_labels():
    inputs, margin, draw = table()
    labels, parts = margin * 1e4 + draw.normal(size=ROWS), parts_of(inputs)

    def program(party):
        own = None if party.deals else parts[party.role]
        columns = party.open_columns(own, fine_bits(ROWS))
        mine = torch.from_numpy(labels) if party.role == 2 else None
        return party.gram(columns), party.label_products(columns, mine)

    found, parties = played(program)
    assert [one == (None, None) for one in found] == [True, True, False, True]
    np.testing.assert_allclose(found[2][0].numpy(), inputs.T @ inputs, atol=1e-5)
    np.testing.assert_allclose(found[2][1].numpy(), inputs.T @ labels, rtol=1e-6, atol=0.1)
    assert {leak.observer for leak in parties.leaks()} == {"P2"}


@pytest.mark.parametrize("name", ["binomial", "poisson"])
def test_sums_at_margins(name):
    inputs, _, draw = table()
    parts, of = parts_of(inputs), family(name)
    b = draw.normal(size=sum(COLUMNS)) / 3
    pieces = np.split(b, np.cumsum(COLUMNS)[:-1])

    def program(party):
        own = None if party.deals else parts[party.role]
        fine = party.open_columns(own, fine_bits(ROWS))
        coarse = party.open_columns(own, coarse_bits(ROWS))
        margins = None if own is None else own @ torch.from_numpy(pieces[party.role])
        return party.sums_at(of, fine, coarse, margins)

    found, parties = played(program)
    want = local_sums(of, inputs)(b)
    np.testing.assert_allclose(found[2].means, want.means, atol=1e-6 * ROWS)
    scale = np.abs(want.curvature).max()
    np.testing.assert_allclose(found[2].curvature, want.curvature, atol=1e-5 * scale)
    assert found[2].normaliser == pytest.approx(want.normaliser, rel=1e-9)
    assert found[0] is found[1] is found[3] is None
    seen = [(leak.observer, leak.elements) for leak in parties.leaks() if "margins" in leak.what]
    assert seen == [("P3", ROWS)]
    dealt = [row for row in parties.traffic() if (row.sender, row.receiver) == ("P3", "P2")]
    assert largest_frame(ROWS, COLUMNS) < sum(row.wire_bytes for row in dealt)
    assert sum(row.wire_bytes for row in dealt) < largest_frame(ROWS, COLUMNS) + 400


def test_means_too_large_to_add_up_have_no_sums():
    inputs, _, _ = table()
    parts = parts_of(inputs)

    def program(party):
        own = None if party.deals else parts[party.role]
        fine = party.open_columns(own, fine_bits(ROWS))
        coarse = party.open_columns(own, coarse_bits(ROWS))
        margins = None if own is None else torch.full((ROWS,), 400.0, dtype=torch.float64)
        return party.sums_at(family("poisson"), fine, coarse, margins)

    found, _ = played(program)
    assert found[2].normaliser == np.inf
    assert np.isfinite(found[2].curvature).all()


def test_a_fit_on_shares_is_that_of_all_rows():
    """To a millionth of a standard error, although two columns say nearly the same."""
    inputs, margin, draw = table(3)
    labels = (draw.random(ROWS) < 1 / (1 + np.exp(-margin))).astype(float)
    parts, of, ends = parts_of(inputs), family("binomial"), np.cumsum(COLUMNS)
    coefficients = {role: queue.SimpleQueue() for role in (0, 1, 3)}

    def program(party):
        own = None if party.deals else parts[party.role]
        fine = party.open_columns(own, fine_bits(ROWS))
        coarse = party.open_columns(own, coarse_bits(ROWS))
        mine = torch.from_numpy(labels) if party.role == 2 else None
        products = party.label_products(fine, mine)

        def sums(b):
            margins = None
            if own is not None:
                margins = own @ torch.from_numpy(np.split(b, ends[:-1])[party.role])
            return party.sums_at(of, fine, coarse, margins)

        if party.role != 2:
            while (b := coefficients[party.role].get(timeout=20)) is not None:
                sums(b)
            return None

        def told(b):
            for one in coefficients.values():
                one.put(b)
            return None if b is None else sums(b)

        start = np.zeros(len(products))
        found = fit(of, outcome_of(of, products.numpy(), labels), told, start=start)
        told(None)
        return found

    found = played(program)[0][2]
    outcome = outcome_of(of, inputs.T @ labels, labels)
    want = fit(of, outcome, local_sums(of, inputs), start=np.zeros(sum(COLUMNS)))
    off = np.abs(found.coefficients - want.coefficients) / want.standard_errors
    assert off.max() < 1e-6
    np.testing.assert_allclose(found.standard_errors, want.standard_errors, rtol=1e-5)


def test_what_is_opened_has_no_pattern():
    """Columns of zeros: what a holder opens, and the helper gets, are uniform elements."""

    def program(party):
        own = None if party.deals else torch.zeros(ROWS, COLUMNS[party.role], dtype=torch.float64)
        fine = party.open_columns(own, fine_bits(ROWS))
        again = party.open_columns(own, fine_bits(ROWS))
        return fine, again

    found, _ = played(program)
    for masked in found[0]:
        assert isinstance(masked, Masked)
        high = (masked.opened >> 60 & 15).numpy()
        counts = np.bincount(high.reshape(-1), minlength=16)
        assert abs(counts / high.size * 16 - 1).max() < 0.3
    assert not torch.equal(found[0][0].opened, found[0][1].opened)


@pytest.mark.parametrize("seed", [0, 1])
def test_sums_over_bins_are_those_of_a_loop_and_no_party_sees_more(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    sizes = [(3, 7), (2, 300)]
    cells = [draw.integers(0, width, (ROWS, count)) for count, width in sizes]
    numbers = draw.integers(-5, 2**40, ROWS)
    seen, receive = [], Channel.receive_bytes

    def watched(channel, number, size, most=None):
        raw = receive(channel, number, size, most)
        seen.append((channel.peer, number, bytes(raw)))
        return raw

    def program(party):
        bins = cells[party.role] if party.role < 2 else None
        return party.bin_sums(sizes, bins, numbers if party.role == 2 else None)

    monkeypatch.setattr(Channel, "receive_bytes", watched)
    found, parties = played(program)
    assert [one is None for one in found] == [True, True, False, True]
    for own, (count, width), one in zip(cells, sizes, found[2], strict=True):
        want = [np.bincount(own[:, at], numbers, width) for at in range(count)]
        np.testing.assert_array_equal(one, np.array(want).astype(np.int64))
    shown = [np.frombuffer(raw, np.uint8) for _, number, raw in seen if len(raw) == 3 * ROWS]
    (shown,) = shown
    assert (np.sort(shown[:ROWS]) == np.sort(cells[0][:, 0])).all()
    assert (shown[:ROWS] != cells[0][:, 0]).any(), "in an order that the helper does not know"
    sent = [np.frombuffer(raw, "<i8") for peer, number, raw in seen if number and len(raw) == 168]
    assert len(sent) == 2, "from the first holder and from the helper"
    for one in sent:
        assert (np.abs(one) > 2**50).mean() > 0.9, "each alone is masked"
    assert {(leak.observer, leak.elements) for leak in parties.leaks()} == {
        ("P2", 3 * 7 + 2 * 300), ("P3", ROWS * 5),
    }  # fmt: skip


def test_a_cell_in_no_bin_is_refused_by_the_helper(monkeypatch):
    """A holder that cheats adds up other bins than it sends."""
    honest = sums.sums_of
    monkeypatch.setattr(
        sums, "sums_of", lambda bins, *rest: honest(np.minimum(bins, rest[-1] - 1), *rest)
    )

    def program(party):
        bins = np.full((ROWS, 3), 9) if party.role == 0 else np.zeros((ROWS, 2), int)
        return party.bin_sums([(3, 7), (2, 7)], bins, np.ones(ROWS, int))

    with pytest.raises(ProtocolError, match="larger than its column has bins"):
        played(program)
