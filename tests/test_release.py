"""`scripts/release`: what it signs can be verified, and what was not run is listed."""

import base64
import getpass
import hashlib
import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

pytest.importorskip("minisign", reason="needs py-minisign, of vfl[dev]")
ROOT = Path(__file__).parents[1]


def loaded():
    loader = SourceFileLoader("release", str(ROOT / "scripts" / "release"))
    module = sys.modules["release"] = module_from_spec(spec_from_loader("release", loader))
    loader.exec_module(module)
    return module


release = loaded()


@pytest.fixture
def dist(tmp_path, monkeypatch):
    """A folder as a build leaves it, and the key to sign it with."""
    folder = tmp_path / "dist"
    folder.mkdir()
    (folder / "vfl-0.2.0-py3-none-any.whl").write_bytes(b"wheel")
    (folder / "sbom.json").write_text("{}")
    monkeypatch.setattr(release, "DIST", folder)
    monkeypatch.setattr(getpass, "getpass", lambda prompt: "")
    release.new_key(tmp_path / "release.key")
    return folder


def verified(folder, key):
    return release.main(["--verify", str(folder), "--public-key", str(key)])


def test_a_signed_release_is_verified_and_a_changed_file_is_not(dist, tmp_path, capsys):
    for _ in range(2):  # the second time the report of the first lies there
        assert release.main(["--only", "sign", "--key", str(tmp_path / "release.key")]) == 0
        assert verified(dist, tmp_path / "release.pub") == 0
    assert f"vfl {release.version()}" in capsys.readouterr().out
    release.new_key(tmp_path / "other.key")
    assert verified(dist, tmp_path / "other.pub") == 1
    (dist / "sbom.json").write_text('{"changed": true}')
    assert verified(dist, tmp_path / "release.pub") == 1
    assert "sbom.json is missing or not as it was signed" in capsys.readouterr().out


def test_the_signature_is_minisigns(dist, tmp_path):
    """Ed25519 of a BLAKE2b-512 digest, as minisign's format says, by another library."""
    release.sign(tmp_path / "release.key")
    public = base64.b64decode((tmp_path / "release.pub").read_text().splitlines()[1])
    lines = (dist / release.SIGNATURE).read_text().splitlines()
    signed = base64.b64decode(lines[1])
    assert (signed[:2], signed[2:10]) == (b"ED", public[2:10])
    key = Ed25519PublicKey.from_public_bytes(public[10:])
    key.verify(signed[10:], hashlib.blake2b((dist / release.SUMS).read_bytes()).digest())
    comment = lines[2].removeprefix("trusted comment: ").encode()
    key.verify(base64.b64decode(lines[3]), signed[10:] + comment)


def test_what_was_not_run_is_listed_and_a_failure_is_not_signed(dist, monkeypatch, capsys):
    def broken():
        raise release.StepError("no disk")

    steps = [
        release.Step("build", "", broken),
        release.Step("net", "", lambda: None),
        release.Step("sign", "", lambda: pytest.fail("a failed release was signed")),
    ]
    monkeypatch.setattr(release, "steps_of", lambda key: steps)
    assert release.main(["--key", "release.key", "--skip", "net"]) == 1
    told = json.loads((dist / "release.json").read_text())["steps"]
    assert [(one["state"], one["why"]) for one in told] == [
        ("failed", "no disk"),
        ("not run", "left out by an option"),
        ("not run", "an earlier step failed"),
    ]
    assert "no disk" in capsys.readouterr().out


def test_a_step_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        release.main(["--only", "biuld"])
    assert end.value.code == 2
    assert "no step is called biuld" in capsys.readouterr().err
