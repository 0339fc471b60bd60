"""Every merger by name, under its contract, and which cuts go together."""

import pytest

from vfl.core.errors import SpecError
from vfl.core.registry import parse
from vfl.models import MERGERS, make_merger
from vfl.testing import MergerContract


class TestMergers(MergerContract):
    specs = ("concat", "sum", "mean", "max")

    def test_every_registered_name_is_under_contract(self):
        assert {parse(spec)[0] for spec in self.specs} == set(MERGERS.names())


class TestConcatOfDifferentWidths(MergerContract):
    specs = ("concat",)
    widths = (1, 5, 2)


@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_cuts_of_different_widths_go_side_by_side_alone(name):
    assert make_merger(name).width([3, 3]) == 3
    with pytest.raises(SpecError, match="cuts of equal width"):
        make_merger(name).width([3, 4])
