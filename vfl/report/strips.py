"""Reconstructed pictures of a grid of attacks: the true ones, what was found, and the mean."""

from __future__ import annotations

from collections.abc import Iterator

from vfl.grid import GridFolder
from vfl.grid.cells import HONEST
from vfl.grid.gallery import Gallery
from vfl.grid.scores_file import OF_CELL, read_scores
from vfl.report.parts import Strip


def strips(folder: GridFolder) -> Iterator[Strip]:
    """One for each attack on pictures and victim of which pictures were kept.

    Raises:
        RunFolderError: a file of a cell is damaged.
    """
    for cell in folder.cells():
        path = folder.cells_path / cell.name
        for one in read_scores(path / OF_CELL):
            if (kept := Gallery(path).get(one.key)) is None:
                continue
            against = "" if cell.adversary in (HONEST, one.attack) else f" against {cell.adversary}"
            measured = [(one.measure, one.value, one.guess), *one.also]
            words = ", ".join(f"{name} {value:.3g}, mean picture {guess:.3g}"
                              for name, value, guess in measured)  # fmt: skip
            means = (kept.mean,) * len(kept.true)
            lines = [("true", kept.true), ("found", kept.found), ("mean", means)]
            yield Strip(f"{one.attack}, {cell.called}{against}", words, lines)
