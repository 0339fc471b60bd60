"""A session over real streams whose rows can be asked for."""

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from served import CONTENT, PARTIES, ROWS
from stand_in_flower import Flower


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Three folders, a trained run, and what `vfl predict` says of new rows."""
    stand_in(monkeypatch)
    draw, played = np.random.default_rng(0), PlayedSession(tmp_path, Flower(PARTIES), CONTENT)
    ids = [f"Zq8id{row:03}" for row in range(ROWS)]
    for name in (*PARTIES, "lender"):
        (tmp_path / name).mkdir()
        columns = {"a": draw.normal(size=ROWS), "b": draw.normal(size=ROWS)}
        if name == "lender":
            columns = {"paid": [f"class{row % 2}" for row in range(ROWS)]}
        pd.DataFrame({"id": ids, **columns}).to_csv(tmp_path / name / "data.csv", index=False)
        more = 'label = "paid"\n' if name == "lender" else ""
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{more}[consent]\n'
        text += "" if name == "lender" else 'modes = ["train", "predict", "serve"]\n'
        played.write(name, text)
    played.introduce(*PARTIES)
    return played
