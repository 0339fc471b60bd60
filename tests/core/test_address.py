"""Addresses as people write them, in every setting that has one."""

import socket
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vfl.config import Experiment
from vfl.config.experiment import FederationSettings
from vfl.config.party_file import Node, ServeSettings
from vfl.config.toml import check
from vfl.core.address import Address, parse_address, parse_host
from vfl.core.errors import ConfigError, UserError
from vfl.federation.project import Project
from vfl.llm.file import LlmFile
from vfl.transport.probe import port_is_free
from vfl.transport.stream import listen

HOSTS = {
    "::1": ["::1", "[::1]", "0:0:0:0:0:0:0:1", "[0000::0001]", "[0::0:1]"],
    "2001:db8::a:7": ["2001:db8::a:7", "[2001:DB8:0:0:0:0:A:7]", "2001:0db8::000a:0007"],
    str(ip_address("::ffff:10.0.0.7")): ["::ffff:10.0.0.7", "[::FFFF:10.0.0.7]", "[::ffff:a00:7]"],
    "64:ff9b::a00:7": ["64:ff9b::10.0.0.7", "[64:FF9B::a00:7]"],
    "10.0.0.7": ["10.0.0.7"],
    "label_party": ["label_party"],
    "a_b.example": ["a_b.example"],
    "xn--bcher-kva.example": ["xn--bcher-kva.example"],
    "7.example": ["7.example"],
    "lender.example.": ["lender.example."],
}
NO_HOSTS = [
    "", " ", "[]", "[", "a b", "-a", "a-", "a..b", "b\u00fccher.example", "10.0.0", "010.0.0.7",
    "127.1", "1.2.3.4.5", ":::", "1::2::3", "[10.0.0.7]", "[name]", "fe80::1%eth0",
    "[fe80::1%25eth0]", "a/b", "user@host", "a\n", "x" * 64, ".".join(["abcdefghi"] * 26),
]  # fmt: skip
NO_ADDRESSES = [
    "lender", "lender:", ":8000", "lender:x", "lender:-1", "lender:80000", "lender:00008000",
    "lender:\u0663", "::1", "::1:8000", "2001:db8::7:8000", "[::1]", "[::1]8000", "[::1:8000",
    "https://lender:8000", "lender:8000/", "lender:8000 ", "[fe80::1%eth0]:8000",
]  # fmt: skip


def the_same(family, host):
    """Whether the operating system takes a host for an address, and for which."""
    return socket.inet_ntop(family, socket.inet_pton(family, host))


@pytest.mark.parametrize(
    ("host", "text"), [(host, text) for host, texts in HOSTS.items() for text in texts]
)
def test_spellings_of_a_host(host, text):
    assert parse_host(text) == host
    if ":" in host:
        bare = text.strip("[]")
        assert the_same(socket.AF_INET6, host) == the_same(socket.AF_INET6, bare)
        text = f"[{bare}]"
    assert parse_address(f"{text}:8000") == Address(host, 8000)
    assert parse_address(str(Address(host, 8000))) == Address(host, 8000)


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host(text):
    with pytest.raises(ValueError, match=r"host|zone|brackets"):
        parse_host(text)


@pytest.mark.parametrize("text", [*NO_ADDRESSES, *(f"{host}:8000" for host in NO_HOSTS)])
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets|65535|host|zone"):
        parse_address(text)


@given(st.ip_addresses(v=6), st.integers(0, 65535))
def test_every_address_of_ipv6(address, port):
    for spelling in (str(address), address.exploded, address.exploded.upper()):
        found = parse_address(f"[{spelling}]:{port}")
        assert parse_address(str(found)) == found
        assert socket.inet_pton(socket.AF_INET6, found.host) == address.packed


@given(st.text())
def test_any_text_is_read_or_refused(text):
    with suppress(ValueError):
        assert parse_address(str(parse_address(text))) == parse_address(text)


AS_WRITTEN = "[0:0:0:0:0:0:0:1]"


@pytest.mark.parametrize(
    ("model", "setting", "with_port"),
    [
        (FederationSettings, "superlink", True),
        (FederationSettings, "stream_host", False),
        (FederationSettings, "bind_host", False),
        (Node, "superlink", True),
        (Node, "ranks_at", True),
        (Node, "rank_host", False),
        (ServeSettings, "host", False),
        (LlmFile, "listen", True),
        (LlmFile, "owner", True),
        (LlmFile, "dealer", True),
    ],
)
def test_every_setting_that_has_an_address(model, setting, with_port):
    field = model.model_fields[setting]
    read = TypeAdapter(Annotated[field.annotation, field]).validate_python
    port = ":8000" if with_port else ""
    assert read(AS_WRITTEN + port) == ("[::1]:8000" if with_port else "::1")
    assert read("my_host" + port) == "my_host" + port
    with pytest.raises(ValueError, match="zone"):
        read("[fe80::1%eth0]" + port)
    if with_port:
        with pytest.raises(ValueError, match="needs brackets"):
            read("::1:8000")


def test_a_mistake_names_its_setting_and_the_cure():
    with pytest.raises(ConfigError) as caught:
        check({"federation": {"superlink": "::1:8000", "stream_host": "a b"}}, Experiment, "a file")
    told = str(caught.value)
    assert "federation.superlink: before a port, an IPv6 address needs brackets" in told
    assert "federation.stream_host: this is not a host" in told


def test_port_0_is_no_place_to_connect_to():
    with pytest.raises(ValueError, match="port 0"):
        Node(superlink="lender.example:0")
    assert Node(ranks_at="10.0.0.7:0").ranks_at == "10.0.0.7:0"
    assert Node(ranks_at="").ranks_at == ""


def test_a_project_for_a_host_of_ipv6():
    project = Project("loans", host="[2001:DB8::7]")
    assert project.host == "2001:db8::7"
    with pytest.raises(UserError) as caught:
        Project("loans", host="https://lender.example")
    assert caught.value.got == "https://lender.example"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listening_by_address_and_name(host):
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        assert not port_is_free(host, port)
        socket.create_connection((host, port), 5).close()


def test_every_address_is_also_ipv4():
    with closing(listen("::", 0)) as listener:
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listener.getsockname()[1]), 5).close()


def test_a_name_that_nobody_knows():
    with pytest.raises(UserError, match="cannot listen") as caught:
        listen("nobody.invalid", 8000)
    assert caught.value.where == "nobody.invalid:8000"
