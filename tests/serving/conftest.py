"""A session over real streams whose rows can be asked for."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from played_session import PlayedSession, stand_in
from served import CONTENT, PARTIES, ROWS, Serving, settings
from stand_in_flower import Flower

from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.serving.local import serve
from vfl.training import run
from vfl.transport import TcpLink


@pytest.fixture(scope="session")
def begun(tmp_path_factory):
    """Three folders in which nothing was played."""
    folder, draw = tmp_path_factory.mktemp("begun"), np.random.default_rng(0)
    played = PlayedSession(folder, Flower(PARTIES), CONTENT)
    ids = [f"Zq8id{row:03}" for row in range(ROWS)]
    for name in (*PARTIES, "lender"):
        (folder / name).mkdir()
        columns = {"a": draw.normal(size=ROWS), "b": draw.normal(size=ROWS)}
        if name == "lender":
            columns = {"paid": [f"class{row % 2}" for row in range(ROWS)]}
        pd.DataFrame({"id": ids, **columns}).to_csv(folder / name / "data.csv", index=False)
        more = 'label = "paid"\n' if name == "lender" else ""
        text = f'party = "{name}"\n[data]\nsource = "data.csv"\nid = "id"\n{more}[consent]\n'
        text += "" if name == "lender" else 'modes = ["train", "predict", "serve"]\n'
        played.write(name, text)
    played.introduce(*PARTIES)
    return played


@pytest.fixture(scope="session")
def predicted_once(begun, tmp_path_factory):
    """The same after a training and a prediction, which every test of it copies."""
    with pytest.MonkeyPatch.context() as patched:
        stand_in(patched)
        played = begun.copied_to(tmp_path_factory.mktemp("predicted"))
        played.play("train")
        played.play("predict")
    return played


@pytest.fixture
def session(tmp_path, monkeypatch, begun):
    """Three folders of a session that begins."""
    stand_in(monkeypatch)
    return begun.copied_to(tmp_path)


@pytest.fixture
def trained(tmp_path, monkeypatch, predicted_once):
    """Three folders with a trained run, and what `vfl predict` says of its rows."""
    stand_in(monkeypatch)
    return predicted_once.copied_to(tmp_path)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A run of one process, and what `vfl predict` wrote of its test rows."""
    content = {key: value for key, value in CONTENT.items() if key != "federation"}
    content |= {"data": {"source": "breast_cancer"}, "label": {"top": "mlp:hidden=8"}}
    folder = tmp_path_factory.mktemp("store") / "runs"
    run.train(Experiment.model_validate(content), folder, "run")
    run.predict(RunFolder.open(folder / "run"))
    return folder / "run"


@pytest.fixture
def local(trained_run):
    """Starts services of that run, and gives a client of each."""
    begun = []

    def start(options=None, **more):
        options = options or settings(**more)
        own = options.token and Path(options.token)
        begun.append(Serving(trained_run, lambda: serve(trained_run, options), token=own))
        begun[-1].client.wait_ready()
        return begun[-1].client

    yield start
    for serving in begun:
        serving.stop()
    shutil.rmtree(trained_run / "clients", ignore_errors=True)


@pytest.fixture(scope="module")
def refusing(trained_run, tmp_path_factory):
    """A client of one service of a copy of that run, for all requests that take nothing from it."""
    copy = tmp_path_factory.mktemp("refusing") / "runs" / "run"
    shutil.copytree(trained_run, copy, ignore=shutil.ignore_patterns("serv*"))
    with Serving(copy, lambda: serve(copy, settings())) as client:
        yield client


@pytest.fixture
def streams(monkeypatch):
    """The feature parties' links, the one attached last at the end."""
    found, attach = [], TcpLink._attach

    def noting(link):
        found.append(link)
        return attach(link)

    monkeypatch.setattr(TcpLink, "_attach", noting)
    return found


class Disk:
    """A small file system of one party's store, which can be filled."""

    def __init__(self, folder):
        self.folder, self._filling = folder, folder / "filling"

    def fill(self):
        """Leave no byte."""
        with self._filling.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self):
        self._filling.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path, request):
    """Of one party's store; requested before a session that fills the store."""
    folder = tmp_path / request.param / "store"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", folder]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield Disk(folder)
    subprocess.run(["umount", folder], check=True)
