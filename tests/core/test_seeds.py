import copy
import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.stats
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from vfl.core.errors import RunFolderError
from vfl.core.seeds import Secret, derive, generator, permutation, scoped
from vfl.privacy import kernel

RAW = bytes(range(32))
SECRET = Secret(RAW)


def in_another_process(expression):
    script = f"from vfl.core.seeds import *; print(({expression}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    return done.stdout.strip()


def test_another_process_draws_the_same():
    expression = (
        "permutation(3, 9, 'order', 2).tolist(), derive(3, 'a', 1), "
        "Secret(bytes(range(32))).uniform((2, 2), 'noise', 5).tolist(), "
        "Secret.of_simulation(3, 'bank').number('init')"
    )
    here = (
        permutation(3, 9, "order", 2).tolist(),
        derive(3, "a", 1),
        SECRET.uniform((2, 2), "noise", 5).tolist(),
        Secret.of_simulation(3, "bank").number("init"),
    )
    assert in_another_process(expression) == str(here)


@pytest.mark.parametrize("width", [1, 2, 7, 24])
def test_some_rows_are_drawn_as_in_the_whole(width):
    whole = SECRET.uniform((50, width), "ties", 3)
    for rows in ([], [0], [1, 2, 8, 49], range(50)):
        chosen = np.array(rows, np.int64)
        assert np.array_equal(SECRET.uniform_rows(chosen, width, "ties", 3), whole[chosen])


@given(seed=st.integers(0, 2**31), rows=st.integers(0, 200))
def test_a_permutation_holds_every_row_once(seed, rows):
    order = permutation(seed, rows, "order")
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_seeds_purposes_and_epochs_give_other_orders():
    orders = [
        tuple(permutation(seed, 50, purpose, epoch))
        for seed in (0, 1)
        for purpose in ("order", "split")
        for epoch in (1, 2)
    ]
    assert len(set(orders)) == len(orders)


def test_purposes_that_read_alike_when_joined_are_kept_apart():
    assert derive(1, "2", 3) != derive(12, 3) != derive(1, 23)
    assert generator(0, "ab", "c").initial_seed() != generator(0, "a", "bc").initial_seed()


def test_scoped_gives_the_global_generator_back():
    before = torch.random.get_rng_state()
    with scoped(5):
        first = torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with scoped(5):
        assert torch.equal(torch.rand(3), first)
    with scoped(6):
        assert not torch.equal(torch.rand(3), first)
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError), scoped(5):
        torch.rand(3) @ torch.rand(4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_threads_draw_what_each_would_draw_alone():
    def drawn(key, start):
        start.wait()
        with scoped(key):
            found = []
            for _ in range(20):
                found.append(torch.rand(1).item())
                time.sleep(0.001)  # lets another thread run
        return found

    keys = range(4)
    with ThreadPoolExecutor(len(keys)) as pool:
        start = threading.Barrier(len(keys))
        together = list(pool.map(lambda key: drawn(key, start), keys))
    assert together == [drawn(key, threading.Barrier(1)) for key in keys]


def test_scopes_nest():
    with scoped(1):
        expected = torch.rand(2)
    with scoped(1):
        first = torch.rand(1)
        with scoped(2):
            torch.rand(7)
        assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_the_stream_is_aes_256_counter_mode():
    key = SECRET.key("mask", 4)
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    counters = b"".join(count.to_bytes(16, "big") for count in range(4))
    assert SECRET.stream(61, "mask", 4) == block.update(counters)[:61]


def test_uniform_is_the_top_53_bits_of_each_word():
    words = np.frombuffer(SECRET.stream(8 * 6, "noise"), dtype="<u8").tolist()
    expected = [(word // 2**11) / 2**53 for word in words]
    drawn = SECRET.uniform((2, 3), "noise")
    assert drawn.dtype == np.float64
    assert drawn.ravel().tolist() == expected


def test_a_row_does_not_depend_on_how_many_follow():
    long = SECRET.uniform((40, 7), "pick", 1)
    assert np.array_equal(SECRET.uniform((3, 7), "pick", 1), long[:3])
    assert SECRET.uniform((0, 7), "pick", 1).shape == (0, 7)


def test_simulated_secrets_differ_by_party_and_seed():
    made = [Secret.of_simulation(seed, name) for seed in (0, 1) for name in ("bank", "shop")]
    assert len({secret.key("x") for secret in made}) == 4
    assert Secret.fresh() != Secret.fresh()


def test_a_secret_is_not_shown_hashed_or_serialised():
    assert repr(SECRET) == str(SECRET) == "Secret(...)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(SECRET)
    for serialise in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="never serialised"):
            serialise(SECRET)
    assert copy.deepcopy([SECRET])[0] is SECRET  # a copy of a model keeps its party's


def test_secrets_compare_by_their_bytes():
    assert Secret(RAW) == SECRET
    assert Secret(RAW[::-1]) != SECRET
    assert SECRET != RAW


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_of_another_length(length):
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(bytes(length))


def test_a_kept_secret_is_the_same_and_only_its_owners(tmp_path):
    path = tmp_path / "store" / "secret"
    first = Secret.kept_at(path)
    assert Secret.kept_at(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_damaged_secret_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(RAW[:31])
    with pytest.raises(RunFolderError, match="damaged") as caught:
        Secret.kept_at(path)
    assert caught.value.want == "32 bytes"
    assert path.read_bytes() == RAW[:31]


@pytest.mark.parametrize(("draw", "law"), [("normal", "norm"), ("laplace", "laplace")])
def test_draws_have_their_law(draw, law):
    values = getattr(SECRET, draw)((200, 50), "law")
    assert values.dtype == np.float64
    assert kstest(values.ravel(), law).pvalue > 0.01
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.25
    tails = np.abs(values) > 3
    expected = 2 * getattr(scipy.stats, law).sf(3) * values.size
    assert tails.sum() == pytest.approx(expected, abs=4 * expected**0.5)


@pytest.mark.parametrize("draw", ["normal", "laplace"])
def test_draws_belong_to_secret_purpose_and_row(draw):
    values = getattr(SECRET, draw)((4, 3), "noise", 5)
    assert np.array_equal(getattr(SECRET, draw)((2, 3), "noise", 5), values[:2])
    assert not np.isclose(getattr(SECRET, draw)((4, 3), "noise", 6), values).any()
    other = Secret.of_simulation(0, "bank")
    assert not np.isclose(getattr(other, draw)((4, 3), "noise", 5), values).any()


def test_the_least_and_largest_uniform_draws_give_finite_noise(monkeypatch):
    most = b"\xff" * 8
    for ends in (bytes(16), most + most, most + bytes(8)):
        monkeypatch.setattr(Secret, "stream", lambda *_, ends=ends: ends)
        assert abs(SECRET.normal((1,))[0]) < 10.3
        assert abs(SECRET.laplace((1,))[0]) < 52.7
        assert kernel.normal_draws(SECRET, 2).isfinite().all()
