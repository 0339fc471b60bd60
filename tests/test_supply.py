"""What vfl is built on: bounds of versions, known vulnerabilities, and the bill of materials."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Packages of which names are used that their makers may change without a word, and the newest
#: version that `scripts/newest` has tested. `vfl.federation.upstream` has the names.
NEWEST_TESTED = {"flwr": Version("1.42.0")}


def requirements():
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    needed = [Requirement(line) for line in lines]
    return [one for one in needed if one.name != PROJECT["name"]]  # extras that name others


def pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("needed", requirements(), ids=str)
def test_a_bound_admits_the_version_that_is_tested(needed):
    assert pinned()[canonicalize_name(needed.name)] in needed.specifier


@pytest.mark.parametrize("needed", requirements(), ids=str)
def test_every_package_has_a_lower_bound_that_scripts_lowest_can_install(needed):
    lower = [one for one in needed.specifier if one.operator == ">="]
    assert len(lower) == 1 or needed.name == "pandas-stubs"


@pytest.mark.parametrize(("name", "newest"), NEWEST_TESTED.items())
def test_a_package_with_internals_in_use_is_bounded_by_what_is_tested(name, newest):
    """The next minor version may name them otherwise."""
    (first, *others) = {str(one.specifier) for one in requirements() if one.name == name}
    admitted = Requirement(f"x{first}").specifier
    assert others == []
    assert newest in admitted
    assert Version(f"{newest.major}.{newest.minor + 1}.0") not in admitted


@pytest.fixture
def audit(tmp_path):
    """Runs the script with a stand-in for pip-audit that answers this."""

    def run(answer, stderr="", *arguments):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        if answer is not None:
            (tmp_path / "answer").write_text(json.dumps({"dependencies": answer}))
        copy = f'cp {tmp_path}/answer "$out"' if answer is not None else "exit 1"
        program = programs / "pip-audit"
        program.write_text(
            f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; out="$2"\n'
            f"echo '{stderr}' >&2\n{copy}\n"
        )
        program.chmod(0o755)
        return subprocess.run(
            [sys.executable, ROOT / "scripts" / "audit", *arguments],
            env={**os.environ, "PATH": f"{programs}{os.pathsep}/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


CLEAN = {"name": "a", "version": "1", "vulns": []}
FLAWED = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("answer", "stderr", "plain", "strict", "words"),
    [
        ([CLEAN], "", 0, 0, "1 packages audited, 0 known vulnerabilities"),
        ([CLEAN, FLAWED], "", 1, 1, "b 2: PYSEC-1, fixed in 3"),
        ([CLEAN, SKIPPED], "", 0, 2, "the database does not know them: c"),
        ([SKIPPED], "", 0, 2, "no advisory database is reachable: not audited"),
        (None, "requests.exceptions.ConnectionError: no", 0, 2, "is reachable: not audited"),
        (None, "error: bad argument", 2, 2, "the audit failed: error: bad argument"),
    ],
    ids=["clean", "flawed", "partly", "no advisories", "offline", "broken"],
)
def test_an_audit_says_what_it_has_seen(audit, answer, stderr, plain, strict, words):
    """An index without advisories makes pip-audit end well; that is no audit."""
    for arguments, code in (((), plain), (("--strict",), strict)):
        done = audit(answer, stderr, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        assert words in done.stdout


@pytest.fixture
def copy(tmp_path):
    """What the script needs of the house; it writes there."""
    copy = tmp_path / "vfl"
    for name in ("scripts/sbom", "vfl/core/version.py", "pyproject.toml"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


#: Stands in for the tool: it keeps its arguments, and writes a bill without a version.
STAND_IN = """\
#!/bin/sh
echo "$@" > {folder}/arguments
while [ "$1" != --output-file ]; do shift; done
echo '{{"metadata": {{"component": {{"name": "vfl"}}}}, "components": []}}' > "$2"
"""


def bill_of_materials(copy, tmp_path, tool):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    if tool:
        (programs / "cyclonedx-py").write_text(STAND_IN.format(folder=tmp_path))
        (programs / "cyclonedx-py").chmod(0o755)
    return subprocess.run(
        [copy / "scripts" / "sbom", "/an/environment"],
        env={**os.environ, "PATH": f"{programs}{os.pathsep}/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_bill_of_materials_is_asked_for_whole_and_gets_its_version(copy, tmp_path):
    from vfl.core.version import VERSION

    done = bill_of_materials(copy, tmp_path, tool=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "dist/sbom.json\n"
    bill = json.loads((copy / "dist" / "sbom.json").read_text())
    assert bill["metadata"]["component"] == {"name": "vfl", "version": VERSION}
    asked = (tmp_path / "arguments").read_text().split()
    assert {"environment", "--validate", "--output-reproducible", "1.6"} <= set(asked)
    assert asked[-1] == "/an/environment"


def test_a_bill_of_materials_without_its_tool_fails(copy, tmp_path):
    done = bill_of_materials(copy, tmp_path, tool=False)
    assert done.returncode == 2
    assert "cyclonedx-py is not installed" in done.stdout
    assert not (copy / "dist").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cyclonedx-py") is None, reason="an environment without '.[dev]'")
def test_the_bill_of_materials_names_what_is_installed(copy):
    subprocess.run([copy / "scripts" / "sbom", sys.executable], check=True, timeout=120)
    text = (copy / "dist" / "sbom.json").read_text()
    bill = json.loads(text)  # its schema was checked by the tool
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    from vfl.core.version import VERSION

    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("vfl", VERSION)
    found = {canonicalize_name(one["name"]): one["version"] for one in bill["components"]}
    assert {"torch", "flwr", "numpy", "cryptography", "pydantic"} <= set(found)
    assert all(one["purl"].startswith("pkg:pypi/") for one in bill["components"] if "purl" in one)
    assert str(ROOT) not in text
