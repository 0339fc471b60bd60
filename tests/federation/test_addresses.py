"""Whole deployments at an address of IPv6, and behind a proxy that makes tunnels."""

import pytest
from connect_proxy import ConnectProxy
from ports import free_ports
from real_deployment import SIDES, Deployment, finish

from vfl.config import read_party_file
from vfl.core.address import Address, parse_address
from vfl.training import demo

pytestmark = pytest.mark.net

AS_WRITTEN = "[0:0:0:0:0:0:0:1]"
#: A name that the proxy alone can resolve.
FAR = "label_party.lender.invalid"


def written(host, *settings, one_port=False):
    """Writes the demo's project for a label party that is reached at a host."""

    def write(folder, more):
        (port,) = free_ports(1)
        at = [f"federation.superlink={host}:{port}", f"federation.stream_host={host}"]
        at += [f"federation.stream_port={port}"] if one_port else []
        label = demo.write_demo(folder, [*more, *at, *settings, "train.epochs=2"])
        for side in SIDES:
            file = folder / side / "party.toml"
            former = read_party_file(file).node.superlink
            file.write_text(file.read_text().replace(former, f"{host}:{port}"))
        return label

    return write


def test_a_training_over_ipv6(tmp_path):
    commands = Deployment(tmp_path / "project", write=written(AS_WRITTEN)).start()
    try:
        assert "listens on [::1]:" in commands.superlink.said()
        finish(commands, commands.train())
        looked = commands.done("doctor", commands.folder / "left" / "party.toml").said()
        assert "[::1]:" in looked
    finally:
        commands.close()


@pytest.mark.parametrize("one_port", [False, True])
def test_both_ports_are_reached_through_a_proxy(tmp_path, monkeypatch, one_port):
    """The label party's commands have the variable, too; on their own machine it means nothing."""
    commands = Deployment(
        tmp_path / "project",
        write=written(FAR, "federation.bind_host=127.0.0.1", one_port=one_port),
    )
    federation = commands.label.experiment().federation
    superlink = parse_address(federation.superlink)
    stream = Address(FAR, federation.stream_port)
    routes = {str(each): ("127.0.0.1", each.port) for each in (superlink, stream)}
    with ConnectProxy(routes, login=("bank", "pa/ss")) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("//", "//bank:pa%2Fss@"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        try:
            commands.start()
            finish(commands, commands.train())
            told = "".join(node.said() for node in commands.nodes.values())
        finally:
            commands.close()
    assert set(proxy.asked) == set(routes)
    assert "ss@" not in told
