"""How long the rest takes, when some cells take much longer than others."""

from vfl.grid.cells import Cell
from vfl.grid.pace import Pace


def cell(defense, seed, tiny):
    title = f"{defense} {seed}"
    return Cell(tiny(), title, {"defense": defense, "seed": str(seed)}, called=title)


def test_what_was_tried_under_another_seed_counts_for_itself(tiny):
    pace = Pace(jobs=1)
    pace.took(cell("baselines", 0, tiny), 100.0)
    pace.took(cell("none", 0, tiny), 4.0)
    pace.took(cell("none", 1, tiny), 6.0)
    assert pace.left_s([cell("none", 2, tiny), cell("baselines", 1, tiny)]) == 105.0


def test_what_was_never_tried_counts_as_the_mean_of_the_others(tiny):
    pace = Pace(jobs=2)
    pace.took(cell("baselines", 0, tiny), 100.0)
    pace.took(cell("none", 0, tiny), 4.0)
    assert pace.left_s([cell("dcor:alpha=1", 0, tiny)]) == 26.0


def test_what_was_left_of_begun_cells_tells_nothing_of_the_others(tiny):
    old, other = cell("none", 0, tiny), cell("dcor:alpha=1", 0, tiny)
    pace = Pace(jobs=1, begun={old.name, other.name})
    pace.took(old, 1.0)
    assert pace.left_s([other, cell("none", 1, tiny)]) == 2.0  # nothing better is known
    pace.took(cell("none", 1, tiny), 200.0)
    assert pace.left_s([other]) == 1.0
    assert pace.left_s([cell("none", 2, tiny), cell("dcor:alpha=1", 1, tiny)]) == 400.0


def test_nothing_is_left_of_nothing(tiny):
    assert Pace(jobs=1).left_s([cell("none", 0, tiny)]) == 0.0
