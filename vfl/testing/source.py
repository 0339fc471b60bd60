"""Tests that every data set must pass; an author of a plug-in subclasses `SourceContract`.

    class TestMine(SourceContract):
        specs = ["mine:noise=0.1"]

pytest then runs each test of the contract for each spec; it skips the tests of a data set whose
files are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest import SkipTest
from unittest.mock import patch

import numpy as np
import pandas as pd

from vfl.core.errors import BadOptionError, MissingDataError
from vfl.core.registry import parse, parts
from vfl.datasets import SOURCES, Dealing, SetFormat, load_bundled
from vfl.datasets.sources import Bundled, make, read_bundled
from vfl.testing.base import Contract, draw_from_all, global_states, require_still

#: A valid value for each setting of `SetFormat`; the values are small enough for every data set.
_SMALL = {"side": 4, "classes": 2, "length": 3, "vocabulary": 5}


class SourceContract(Contract):
    """Properties of every named data set.

    Attributes:
        root: folder of the data sets' files; None means the folder in the environment variable
            VFL_DATA.
        limit: number of rows that a test reads; some data sets need a larger number, so that each
            of training, validation and test has a row.
    """

    family = "data set"
    root: ClassVar[Path | None] = None
    limit: ClassVar[int] = 60

    def test_every_row_has_a_valid_label(self, spec: str) -> None:
        found = self.read(spec)
        assert found.rows == len(self.cells(found)), "the numbers of rows and labels differ"
        assert found.labels.dtype == np.int64, "labels are codes, int64"
        assert found.labels.min() >= 0, "a label is negative"
        assert found.labels.max() < len(found.classes), "a label belongs to no class"

    def test_inputs_are_finite(self, spec: str) -> None:
        cells = self.cells(self.read(spec))
        if isinstance(cells, np.ndarray):
            assert cells.ndim in (2, 4), (
                "inputs need axes (rows, steps) or (rows, channels, height, width)"
            )
            assert np.isfinite(cells).all(), "an input value is not finite"

    def test_limit_bounds_the_rows(self, spec: str) -> None:
        many, few = self.read(spec), self.read(spec, limit=9)
        assert many.rows <= self.limit
        assert few.rows <= 9
        for part in (many, few):
            assert (part.train_rows or 0) + part.validation_rows <= part.rows

    def test_declared_parts_exist(self, spec: str) -> None:
        found, own = self.read(spec), tuple(make(spec).own_parts)
        assert ("test" in own) == (found.train_rows is not None), (
            "`own_parts` and the data set disagree about own test rows"
        )
        assert ("validation" in own) == bool(found.validation_rows), (
            "`own_parts` and the data set disagree about own validation rows"
        )

    def test_reading_is_deterministic(self, spec: str) -> None:
        first, states = self.read(spec), global_states()
        again = self.read(spec)
        require_still(states)
        draw_from_all()
        third = self.read(spec)
        for other in (again, third):
            assert (self.cells(first) == self.cells(other)).all(axis=None), "cells differ"
            assert (first.labels == other.labels).all(), "labels differ"

    def test_no_network_is_used_without_permission(self, spec: str) -> None:
        with _no_network() as asked, TemporaryDirectory() as empty:
            for root in (self.root, Path(empty)):
                try:
                    read_bundled(spec, root, limit=self.limit)
                except MissingDataError:
                    continue
        assert not asked, "a data set is downloaded only if --download requests it"

    def test_settings_are_followed_or_refused(self, spec: str) -> None:
        whole, follows = self.read(spec), make(spec).follows
        assert set(follows) <= {each.name for each in fields(SetFormat)}
        for name, value in _SMALL.items():
            form = SetFormat(**{name: value})  # type: ignore[arg-type]
            if name not in follows:
                try:
                    read_bundled(spec, self.root, form=form)
                except BadOptionError:
                    continue
                raise AssertionError(f"data.{name} changes nothing, but the data set accepts it")
            found = self.read(spec, form=form)
            if name == "classes":
                assert found.classes == whole.classes[:value], "not the first classes"
                continue
            cells = self.cells(found)
            assert isinstance(cells, np.ndarray), f"a data set of a table has no {name}"
            if name == "vocabulary":
                assert cells.max() < value, "more different numbers than data.vocabulary"
            else:
                assert cells.shape[-1] == value, f"the rows' last axis does not follow data.{name}"

    def test_parties_get_columns_of_the_same_rows(self, spec: str) -> None:
        self.read(spec)
        data = load_bundled(
            spec,
            ["left", "right"],
            "label",
            Dealing(0, limit=self.limit),
            flatten=True,
            root=self.root,
        )
        left, right = data["left"], data["right"]
        assert left.inputs is not None
        assert right.inputs is not None
        assert len(left.inputs) == len(right.inputs) == left.rows
        assert left.inputs.isfinite().all()
        assert right.inputs.isfinite().all()

    def test_name_is_registered(self, spec: str) -> None:
        assert {parse(one)[0] for one in parts(spec)} <= set(SOURCES.names())

    def read(self, spec: str, limit: int | None = None, form: SetFormat | None = None) -> Bundled:
        """Read some rows of a data set; skip the test if the data set's files are missing."""
        try:
            return read_bundled(spec, self.root, limit=limit or self.limit, form=form)
        except MissingDataError as missing:
            raise SkipTest(str(missing)) from None

    def cells(self, found: Bundled) -> np.ndarray | pd.DataFrame:
        """Return the rows' inputs; each text becomes numbers of its words in a vocabulary."""
        cells = found.cells
        if isinstance(cells, (np.ndarray, pd.DataFrame)):
            return cells
        return cells.rows(np.arange(found.rows))


@contextmanager
def _no_network() -> Iterator[list[str]]:
    """Refuse all address look-ups and connections in this context; record the addresses."""
    asked: list[str] = []

    def refuse(*given: Any, **named: Any) -> None:
        asked.append("network")
        raise OSError("this test has no network")

    with patch("socket.getaddrinfo", refuse), patch("socket.socket.connect", refuse):
        yield asked
