"""The cells of examples/tensors.ipynb, one after the other."""

import json
import runpy
from pathlib import Path

import torch

from vfl import tensors

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tensors.ipynb"


def test_the_notebook_shows_the_chain_in_ten_cells(tmp_path, capsys):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 10
    assert not any(cell.get("outputs") for cell in cells)
    program = tmp_path / "cells.py"
    program.write_text("\n".join(code), encoding="utf-8")
    torch.manual_seed(0)
    try:
        after = runpy.run_path(str(program))
    finally:
        tensors.unhook()
    assert "error[V403]" in capsys.readouterr().out
    assert repr(after["moved"]).startswith("<pointer to 2x2 at bob")
    assert "shares at alice, bob; dealer carol" in repr(after["shared"])
    assert torch.allclose(after["learned"], torch.tensor([[1.0], [-1.0]]), atol=0.01)
    for worker in (after[name] for name in ("alice", "bob", "carol")):
        worker.stop()
