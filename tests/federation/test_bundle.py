"""Bundles a party runs: vfl's own as Flower builds it, those it pinned, and nothing else."""

import hashlib
import io
import subprocess
import tomllib
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

from vfl.config import Experiment, PartyFile, read_party_file
from vfl.core.errors import ConfigError, ConsentError
from vfl.federation import bundle, deployment, programs
from vfl.federation.bundle import check_bundle
from vfl.federation.project import write_project

with warnings.catch_warnings():  # importing typer, as flwr does, uses what newer clicks deprecate
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.cli.build import build_fab_from_disk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "project"
    experiment = Experiment.model_validate({"name": "loans", "parties": {"bank": {}}})
    data = {"source": "rows.csv", "id": "id"}
    parties = {
        name: PartyFile.model_validate({"party": name, "data": data}) for name in ("bank", "label")
    }
    return write_project(folder, experiment, parties, "127.0.0.1")


@pytest.fixture(scope="module")
def built(project):
    """The bundle as `flwr run` makes it."""
    return build_fab_from_disk(project.app)


def files_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
    return content.getvalue()


def changed_settings(built, change):
    settings = tomllib.loads(files_of(built)["pyproject.toml"].decode())
    change(settings)
    return tomli_w.dumps(settings).encode()


def test_the_bundle_of_every_project_is_accepted(built):
    check_bundle(built, ["vfl"])
    assert set(files_of(built)) == bundle._FILES


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("vfl_app.py", {"vfl_app.py": b"import os\n"}),
        ("its files", {"torch.py": b"import os\n"}),
        ("its files", {"../../outside.py": b""}),
        ("its size", {"experiment.toml": b"#" * 2_000_000}),
        ("its form", {"pyproject.toml": b"project = 3"}),
    ],
)
def test_anything_else_is_refused(built, where, change):
    files = files_of(built) | change
    with pytest.raises(ConsentError, match="does not run the app bundle") as caught:
        check_bundle(zipped(files.items()), ["vfl"])
    assert caught.value.where == where


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["tool"]["flwr"]["app"]["components"].update(clientapp="antigravity:fly"),
        lambda s: s["project"].update(dependencies=["something-else"]),
        lambda s: s["project"].update(name="../elsewhere"),
        lambda s: s["project"].update(version="2.0.0"),
        lambda s: s["tool"]["flwr"]["app"].update(publisher="somebody"),
    ],
)
def test_settings_that_lead_elsewhere_are_refused(built, change):
    files = files_of(built) | {"pyproject.toml": changed_settings(built, change)}
    with pytest.raises(ConsentError) as caught:
        check_bundle(zipped(files.items()), ["vfl"])
    assert caught.value.where == "pyproject.toml"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name_are_refused(built):
    twice = [*files_of(built).items(), ("vfl_app.py", b"import os\n")]
    with pytest.raises(ConsentError) as caught:
        check_bundle(zipped(twice), ["vfl"])
    assert caught.value.where == "its files"


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip"])
def test_what_is_no_archive_is_refused(content):
    with pytest.raises(ConsentError):
        check_bundle(content, ["vfl"])


def test_a_damaged_archive_is_refused(built):
    for place in range(0, len(built), 7):
        damaged = bytearray(built)
        damaged[place] ^= 0xFF
        try:
            check_bundle(bytes(damaged), ["vfl"])
        except ConsentError:
            continue
        with zipfile.ZipFile(io.BytesIO(damaged)) as archive:
            assert archive.read("vfl_app.py") == bundle.shim().encode()


def test_a_pinned_bundle_is_accepted_and_no_other():
    other = zipped([("their_app.py", b"print()")])
    digest = hashlib.sha256(other).hexdigest()
    check_bundle(other, [digest])
    with pytest.raises(ConsentError) as caught:
        check_bundle(other + b" ", ["vfl", digest])
    assert digest in caught.value.want
    assert hashlib.sha256(other + b" ").hexdigest() in caught.value.got


def test_vfls_own_bundle_can_be_left_out(built):
    with pytest.raises(ConsentError):
        check_bundle(built, [])


@pytest.fixture
def install(monkeypatch):
    """The install function that Flower calls: `vfl` wraps the one of this stand-in for Flower."""
    runtime = SimpleNamespace(install_from_fab=lambda content, **options: "installed")
    command = SimpleNamespace(flwr_clientapp=lambda: None)
    monkeypatch.setattr(programs, "_show_secret", lambda: None)
    internals = (SimpleNamespace(load=lambda one=one: one) for one in (runtime, command))
    programs._run_bundle(*internals, "flwr_clientapp")
    return runtime.install_from_fab


def test_an_error_of_a_partys_own_file_reaches_flower_without_details(
    install, monkeypatch, tmp_path, capsys, built
):
    """Flower sends the text of an error of its install function to the label party."""
    file = tmp_path / "party.toml"
    file.write_text('party = "bank"\nsecret_column = 4711\n')
    monkeypatch.setenv(programs.PARTY_FILE_VARIABLE, str(file))
    with pytest.raises(ConfigError) as caught:
        install(built, skip_prompt=True)
    assert "its own log says why" in str(caught.value)
    for detail in (str(tmp_path), "party.toml", "secret_column", "4711"):
        assert detail not in str(caught.value)
    assert "secret_column" in capsys.readouterr().out


def test_an_accepted_bundle_is_installed(install, monkeypatch, project, built):
    file = project.path.parent / "bank" / "party.toml"
    monkeypatch.setenv(programs.PARTY_FILE_VARIABLE, str(file))
    assert install(built, skip_prompt=True) == "installed"


def test_flowers_other_programs_are_not_for_a_party(tmp_path):
    """Flower names them; a new one among them must be thought about."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    assert set(TASK_TYPE_TO_COMMAND.values()) <= set(programs._PROGRAMS)
    folder = tmp_path / "a folder"
    feature = programs.supernode_environment(folder / "node", tmp_path / "x.toml")
    label = programs.superlink_environment(folder / "link", tmp_path / "x.toml", "", "")
    refused = [(feature, "flwr-agentapp"), (feature, "flwr-serverapp"), (label, "flwr-clientapp")]
    for environment, program in refused:
        path = Path(environment["PATH"].split(":")[0]) / program
        done = subprocess.run([path], capture_output=True, text=True, timeout=60)
        assert done.returncode == 3, done.stderr
        assert f"does not run {program}" in done.stdout


def test_a_supernode_finds_our_programs_first(project, monkeypatch):
    started = []

    class Recorded(deployment.Service):
        def __init__(self, name, command, environment, log):
            started.append(environment)

        def wait_for(self, marker, timeout_s=60.0, refusals=()):
            pass

    monkeypatch.setattr(deployment, "Service", Recorded)
    monkeypatch.setattr(deployment, "check_server", lambda *_, **__: None)
    file = project.path.parent / "bank" / "party.toml"
    deployment.start_supernode(read_party_file(file), file)
    first = started[0]["PATH"].split(":")[0]
    assert first == str(file.parent / "store" / "flower" / "bin")
    assert started[0]["VFL_PARTY_FILE"] == str(file)
    done = subprocess.run(
        ["flwr-clientapp", "--help"], env=started[0], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "ClientApp" in done.stdout) == (0, True), done.stderr
