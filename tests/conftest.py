from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import ForkingSubprocess
from hypothesis import settings

with warnings.catch_warnings():  # importing typer uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

    from vfl.cli import main

torch.set_num_threads(1)
# Hundreds of tests run a command, and each would build all of them again.
typer.main.get_command = functools.cache(typer.main.get_command)
# No test cuts the power, so none needs to wait for the disk.
os.fsync = lambda descriptor: None
# What a background job ignores, its children ignore; tests press Ctrl-C in processes they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, on machines of any speed, and no folder of examples left behind.
settings.register_profile("vfl", derandomize=True, deadline=None, database=None)
settings.load_profile("vfl")


class Collection:
    """A quick collection: every worker repeats it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Collect no garbage before the tests: modules and items live until the end."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Look for examples only in modules of the package whose text has one."""
        found = yield
        if file_path.name.startswith("test_"):
            return [one for one in found if type(one) is pytest.Module]
        if file_path.suffix == ".py" and ">>>" not in file_path.read_text("utf-8"):
            return []
        return found


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Collection())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same draws whatever ran before, for tests run side by side in an order of their own."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; a test that needs it is skipped where there is none."""
    beside = Path(__file__).parents[2] / "shared" / "datasets"
    root = Path(os.environ.get("VFL_DATA") or beside)
    if not root.is_dir():
        pytest.skip(f"there is no folder of data sets at {root}; VFL_DATA names it")
    return root


@pytest.fixture
def quick_processes() -> Iterator[None]:
    """Processes of vfl that this test starts are forks: a new one imports torch for seconds."""
    with ForkingSubprocess("vfl").at_work():
        yield


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def vfl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Done]]:
    """Runs the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there
    signals = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["vfl", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Done(code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, signals)
