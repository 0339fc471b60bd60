"""What is given away: a wheel that is whole, and that works where there is no checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.metadata import parse_email
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: Files that are no Python and are read by the package.
DATA = re.compile(r"vfl/(core/explanations/V\d{3}\.md|py\.typed)")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling, of vfl[dev]"),
]


def run(*command, folder, **options):
    done = subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=540, **options
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """An environment with the wheel, beside the packages that this one has; no checkout in it."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    own = folder / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    run(*pip, "--no-deps", "--ignore-installed", wheel, folder=folder)
    left_out = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = f"{python.parent}{os.pathsep}{Path(sys.executable).parent}"
    return folder, python.parent / "vfl", left_out | {"PATH": f"{paths}{os.pathsep}{os.defpath}"}


def test_the_wheel_is_whole(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        found, unread = parse_email(archive.read(about))
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "vfl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here - names == set()
    assert {name for name in names if not name.startswith("vfl-")} - here == set()
    assert any(DATA.fullmatch(name) for name in names)
    assert unread == {}
    assert found["name"] == "vfl"
    assert found["description_content_type"] == "text/markdown"
    assert "## Install" in found["description"]
    assert {"torch", "flwr"} <= {Requirement(line).name for line in found["requires_dist"]}


def test_the_installed_one_is_not_the_checkout(fresh):
    folder, vfl, environment = fresh
    asked = "import vfl, sys; print(vfl.__file__)"
    found = run(vfl.parent / "python", "-c", asked, folder=folder, env=environment).strip()
    assert found.startswith(str(folder))
    assert "V104" in run(vfl, "explain", "--list", folder=folder, env=environment)


def test_the_demo_runs_outside_the_checkout(fresh):
    """Its own SuperLink, SuperNodes and workers, all of them from the wheel."""
    folder, vfl, environment = fresh
    said = run(vfl, "demo", "-s", "train.epochs=2", folder=folder, env=environment)
    assert re.search(r"^test accuracy +0\.[5-9]", said, re.M)
    (report,) = re.findall(r"^report +(\S+)", said, re.M)
    assert (folder / report).is_file()
