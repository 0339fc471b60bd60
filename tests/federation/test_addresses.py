"""A whole deployment at an address of IPv6, as its users may write it."""

import pytest
from ports import free_ports
from real_deployment import SIDES, Deployment, finish

from vfl.training import demo

pytestmark = pytest.mark.net

AS_WRITTEN = "[0:0:0:0:0:0:0:1]"


def write(folder, settings):
    (port,) = free_ports(1)
    at = [f"federation.superlink={AS_WRITTEN}:{port}", f"federation.stream_host={AS_WRITTEN}"]
    label = demo.write_demo(folder, [*settings, *at, "train.epochs=2"])
    for side in SIDES:
        file = folder / side / "party.toml"
        lines = file.read_text().splitlines()
        file.write_text(
            "\n".join(
                f'superlink = "{AS_WRITTEN}:{port}"' if line.startswith("superlink") else line
                for line in lines
            )
        )
    return label


def test_a_training_over_ipv6(tmp_path):
    commands = Deployment(tmp_path / "project", write=write).start()
    try:
        assert "listens on [::1]:" in commands.superlink.said()
        finish(commands, commands.train())
        looked = commands.done("doctor", commands.folder / "left" / "party.toml").said()
        assert "[::1]:" in looked
    finally:
        commands.close()
