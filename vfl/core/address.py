"""Parsers of network addresses in settings, options, messages and connections."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

_LAST_PORT = 65535
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
#: A pattern of host names; a host name in a compose file or a container may contain underscores.
#: Text of only digits and dots does not match, because it looks like an IPv4 address.
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?=.*[A-Za-z]){_LABEL}(\.{_LABEL})*\.?", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class Address(NamedTuple):
    """Network address of a program that listens for connections.

    Attributes:
        host: host name, or an IPv4 or IPv6 address without brackets.
        port: port number, 0 to 65535; 0 takes any free port.

    >>> str(Address("::1", 8000)), str(Address("lender.example", 8000))
    ('[::1]:8000', 'lender.example:8000')
    """

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_host(text: str) -> str:
    """Parse a host; an IPv6 address is returned in its shortest form.

    Args:
        text: a host name, an IPv4 address, or an IPv6 address with or without brackets.

    Raises:
        ValueError: the text is not such a host; the error's message gives the reason and does not
            quote the text.

    >>> parse_host("[2001:DB8:0:0::7]"), parse_host("my_host.example"), parse_host("10.0.0.7")
    ('2001:db8::7', 'my_host.example', '10.0.0.7')
    """
    bracketed = text.startswith("[") and text.endswith("]")
    bare = text[1:-1] if bracketed else text
    if "%" in bare:
        raise ValueError(
            "an address with a zone (%) is valid on one machine only; use another address "
            "of that machine, or its name"
        )
    if not bracketed and _NAME.fullmatch(bare):
        return bare
    try:
        address = ip_address(bare)
    except ValueError:
        raise ValueError(
            "this is not a host; want a name of ASCII letters, digits, '-', '_' and '.', "
            "an IPv4 address, or an IPv6 address"
        ) from None
    if bracketed and address.version == 4:
        raise ValueError("only IPv6 addresses have brackets")
    return str(address)


def parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    """Parse the IP address of a connection; return None for other texts, such as a file's path.

    A zone is left out, and an IPv4 address in IPv6 form becomes an IPv4 address.

    >>> str(parse_ip("::ffff:10.0.0.7")), str(parse_ip("fe80::1%eth0")), parse_ip("localhost")
    ('10.0.0.7', 'fe80::1', None)
    """
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, which only this machine can reach.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("lender.example")
    (True, True, False)
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """Parse a host and a port in the form HOST:PORT.

    Args:
        text: host and port; the host has a form that `parse_host` accepts, but an IPv6 address
            needs brackets.

    Raises:
        ValueError: the text has another form; the error's message gives the reason and does not
            quote the text.

    >>> parse_address("[0:0:0:0:0:0:0:1]:8000")
    Address(host='::1', port=8000)
    >>> parse_address("::1:8000")
    Traceback (most recent call last):
    ...
    ValueError: before a port, an IPv6 address needs brackets: [2001:db8::7]:8000
    """
    if "://" in text:
        raise ValueError("an address is HOST:PORT, without a scheme such as https://")
    host, colon, port = text.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("before a port, an IPv6 address needs brackets: [2001:db8::7]:8000")
    if not (colon and host and _PORT.fullmatch(port)):
        raise ValueError("this is not HOST:PORT, such as lender.example:8000 or [2001:db8::7]:8000")
    if int(port) > _LAST_PORT:
        raise ValueError(f"a port is at most {_LAST_PORT}")
    return Address(parse_host(host), int(port))
