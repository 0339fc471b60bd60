"""Saved cuts: what is read, and what each file that is none is told."""

import numpy as np
import pytest
import torch

from vfl.compression.measure import read_cut
from vfl.core.errors import DataError, MissingDataError, NonFiniteError, UserError

VALUES = np.arange(12).reshape(4, 3) / 8


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_float_of_numpy_becomes_float32(tmp_path, dtype, order):
    np.save(tmp_path / "cut.npy", np.asarray(VALUES, dtype, order=order))
    cut = read_cut(tmp_path / "cut.npy")
    assert cut.dtype == torch.float32
    assert cut.is_contiguous()
    assert cut.tolist() == VALUES.tolist()


def test_one_array_needs_no_name_and_several_do(tmp_path):
    np.savez(tmp_path / "one.npz", cut=VALUES)
    assert read_cut(tmp_path / "one.npz").tolist() == VALUES.tolist()
    np.savez_compressed(tmp_path / "two.npz", bank=VALUES, shop=VALUES + 1)
    assert read_cut(tmp_path / "two.npz", "shop").tolist() == (VALUES + 1).tolist()
    with pytest.raises(DataError, match="has several arrays") as caught:
        read_cut(tmp_path / "two.npz")
    assert (caught.value.got, caught.value.fix) == ("bank, shop", "--array bank")
    with pytest.raises(DataError, match="no array is called 'shopp'") as caught:
        read_cut(tmp_path / "two.npz", "shopp")
    assert caught.value.fix == "did you mean 'shop'?"
    np.savez(tmp_path / "none.npz")
    with pytest.raises(DataError) as caught:
        read_cut(tmp_path / "none.npz")
    assert caught.value.got == "no array at all"
    np.save(tmp_path / "cut.npy", VALUES)
    with pytest.raises(UserError, match="without a name"):
        read_cut(tmp_path / "cut.npy", "shop")


@pytest.mark.parametrize(
    ("values", "told", "got"),
    [
        (np.ones((4, 3), np.int64), "floating-point", "int64"),
        (np.ones((4, 3), np.complex64), "floating-point", "complex64"),
        (np.ones((4, 3), np.longdouble), "floating-point", str(np.dtype(np.longdouble))),
        (np.array(["a"]), "floating-point", "<U1"),
        (np.ones(4), "two axes", "4"),
        (np.float64(1), "two axes", "a single number"),
        (np.ones((4, 3, 2)), "two axes", "4 x 3 x 2"),
        (np.ones((0, 3)), "without values", "0 x 3"),
        (np.ones((3, 0)), "without values", "3 x 0"),
    ],
)
def test_what_is_no_cut(tmp_path, values, told, got):
    np.save(tmp_path / "cut.npy", values)
    with pytest.raises(DataError, match=told) as caught:
        read_cut(tmp_path / "cut.npy")
    assert caught.value.got == got
    assert caught.value.where == str(tmp_path / "cut.npy")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_float32_cannot_hold(tmp_path, value):
    np.save(tmp_path / "cut.npy", np.array([[1.0, value, 2.0], [value, 0.0, 0.0]]))
    with pytest.raises(NonFiniteError) as caught:
        read_cut(tmp_path / "cut.npy")
    assert caught.value.got == "2 of 6 values"


def test_objects_are_not_unpickled(tmp_path):
    objects = np.array([{"a": 1}], dtype=object)
    np.save(tmp_path / "cut.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "cut.npz", cut=objects)
    for name in ("cut.npy", "cut.npz"):
        with pytest.raises(DataError, match="without pickle"):
            read_cut(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x93NUMPY", b"PK\3\4", b"\x80\x04]"])
@pytest.mark.parametrize("name", ["cut.npy", "cut.npz"])
def test_other_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="without pickle"):
        read_cut(tmp_path / name)


def test_a_file_that_is_not_there_and_the_one_that_was_meant(tmp_path):
    np.save(tmp_path / "cut.npy", VALUES)
    with pytest.raises(MissingDataError) as caught:
        read_cut(tmp_path / "cuts.npy")
    assert caught.value.fix == "did you mean 'cut.npy'?"
