"""The recipes of deploy/: they fit the program, the platform's own rules and each other.

No container engine, cluster or service manager runs here. Schemas of Kubernetes are looked at where
the package kubernetes-validate is installed.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
SCRIPTS = [DEPLOY / name for name in ("install", "wheelhouse", "healthy")]
USER = "10001"


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def the(kind, path):
    (found,) = [each for each in documents(path) if each["kind"] == kind]
    return found


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_for_any_shell(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True)


# --- systemd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_as_systemd_wants_them(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    for each in UNITS:  # vfl is not installed where the unit says
        text = each.read_text().replace("/opt/vfl/bin/vfl", shutil.which("true"))
        (tmp_path / each.name).write_text(text)
    instance = tmp_path / unit.name.replace("@", "@bank")
    done = subprocess.run(
        ["systemd-analyze", "verify", instance.name], cwd=tmp_path, capture_output=True, text=True
    )
    told = [line for line in done.stderr.splitlines() if unit.name.partition("@")[0] in line]
    assert not told
    assert done.returncode == 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_run_commands_that_there_are(unit):
    text = unit.read_text()
    command = re.search(r"^ExecStart=/opt/vfl/bin/vfl (\w+) /var/lib/vfl/%i", text, re.M)[1]
    assert command in ("up", "serve")
    assert re.search(rf"^vfl {command} ", (ROOT / "docs/tutorial.md").read_text(), re.M)
    assert {"User=vfl", "NoNewPrivileges=yes", "ProtectSystem=strict", "UMask=0077"} <= set(
        text.splitlines()
    )


# --- the image -----------------------------------------------------------------------------------


def test_the_image_runs_as_nobody_special_and_copies_what_there_is():
    text = (DEPLOY / "Containerfile").read_text()
    assert re.search(rf"^USER {USER}:{USER}$", text, re.M)
    for line in re.findall(r"^COPY (?!--from)(\S+) ", text, re.M):
        assert line == "dist" or (ROOT / line).exists()
    final = text.rpartition("FROM ")[2]
    assert final.index("RUN apt-get") < final.index("USER ")
    assert "HEALTHCHECK" in final
    assert "useradd --uid " + USER in final


def test_health_is_whether_the_service_of_a_folder_listens(tmp_path):
    def healthy():
        done = subprocess.run([DEPLOY / "healthy", tmp_path], capture_output=True, text=True)
        return done.returncode == 0

    assert not healthy()
    for place in ("flower", "store/flower"):  # of a label party, and of a feature party
        folder = tmp_path / place / "local"
        folder.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            (folder / "address").write_text(f"127.0.0.1:{listener.getsockname()[1]}")
            assert healthy()
        assert not healthy()
        shutil.rmtree(tmp_path / place)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ([], set()),
        (
            ["manylinux_2_28_aarch64", "3.12"],
            {f"manylinux_2_{n}_aarch64" for n in (17, 24, 27, 28)} | {"manylinux2014_aarch64"},
        ),
        (
            ["manylinux_2_28_x86_64", "3.13"],
            {f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28)} | {"manylinux2014_x86_64"},
        ),
    ],
)
def test_a_wheelhouse_asks_for_the_wheels_of_its_target(tmp_path, more, names):
    house, asked = tmp_path / "house", tmp_path / "asked"
    house.mkdir()
    (house / "some.whl").write_bytes(b"")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {asked}\n')
    python.chmod(0o700)
    subprocess.run(
        [DEPLOY / "wheelhouse", house, "vfl.whl", *more],
        env={**os.environ, "PYTHON": str(python)},
        check=True,
        capture_output=True,
    )
    words = asked.read_text().split("\n")
    platforms = {words[n + 1] for n, word in enumerate(words) if word == "--platform"}
    assert platforms == names
    assert words[-2] == "vfl.whl[serve]"
    assert "some.whl" in (house / "SHA256SUMS").read_text()


# --- containers ----------------------------------------------------------------------------------


def test_the_composed_tutorial_is_the_tutorial():
    services = compose()["services"]
    page = (ROOT / "docs" / "tutorial.md").read_text()
    told = re.search(r"^vfl (init project .*)$", page, re.M)[1].split()
    composed = [word for each in services["init"]["command"] for word in each.split("=", 1)]
    host = composed.index("--host")
    assert composed.pop(host + 1) == "clinic"  # the name of its service
    del composed[host]
    assert composed == told
    for name in ("clinic", "laboratory"):
        folders = [volume.split(":")[1] for volume in services[name]["volumes"]]
        assert folders == ["/party", f"/tutorial/{name}.csv"]  # where `vfl init` saw it


def test_composed_containers_are_closed():
    for service in compose()["services"].values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert USER in service["user"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.28", "1.33", "1.37"])
def test_manifests_have_the_schema_of_kubernetes(path, version):
    validator = pytest.importorskip("kubernetes_validate")
    for each in documents(path):
        validator.validate(each, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_are_closed_and_whole(path):
    workload = the("StatefulSet", path)["spec"]
    pod = workload["template"]["spec"]
    assert workload["replicas"] == 1
    assert workload["selector"]["matchLabels"] == workload["template"]["metadata"]["labels"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == USER
    assert pod["automountServiceAccountToken"] is False
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in workload["volumeClaimTemplates"]}
    used = set()
    for container in pod["initContainers"] + pod["containers"]:
        closed = container["securityContext"]
        assert closed["readOnlyRootFilesystem"]
        assert not closed["allowPrivilegeEscalation"]
        assert closed["capabilities"] == {"drop": ["ALL"]}
        assert "limits" in container["resources"]
        used |= {mount["name"] for mount in container["volumeMounts"]}
    assert used == volumes
    assert {"startupProbe", "livenessProbe"} <= set(pod["containers"][0])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_networks_are_closed_both_ways(path):
    policy, workload = the("NetworkPolicy", path)["spec"], the("StatefulSet", path)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"] == workload["selector"]["matchLabels"]
    for way, peers in (("ingress", "from"), ("egress", "to")):
        for rule in policy[way]:
            assert rule[peers]
            assert rule["ports"]
    if path.stem == "feature-party":
        assert policy["ingress"] == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_files_that_are_copied_are_for_their_owner_alone(path, tmp_path):
    (copying,) = the("StatefulSet", path)["spec"]["template"]["spec"]["initContainers"]
    script = copying["args"][0]
    given = [mount["mountPath"] for mount in copying["volumeMounts"] if mount.get("readOnly")]
    for place in given:  # a mounted volume links its files to a hidden folder
        folder = tmp_path / place.lstrip("/")
        (folder / "..data").mkdir(parents=True)
        for name in ("party.toml", "shop.pub"):
            (folder / "..data" / name).write_text(place)
            (folder / name).symlink_to(f"..data/{name}")
            (folder / "..data" / name).chmod(0o440)
    (tmp_path / "party").mkdir()
    local = re.sub(r"(?<![\w.])/(given|peers|party)", rf"{tmp_path}/\1", script)
    for _ in range(2):  # a pod that is started again
        subprocess.run([*copying["command"], local], check=True)
    copied = [each for each in (tmp_path / "party").rglob("*") if each.is_file()]
    assert len(copied) >= 3
    assert {stat.S_IMODE(each.stat().st_mode) for each in copied} == {0o600}
