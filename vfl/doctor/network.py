"""The way to the other parties; contacts only the addresses in the user's own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vfl.doctor.check import Check
from vfl.errors import PeerError, UserError
from vfl.transport.probe import Probe, port_is_free, probe_https

#: Flower refuses the signature of a node whose clock differs by more (TIMESTAMP_TOLERANCE).
CLOCK_TOLERANCE_S = 300
_CLOCK_WARNING_S = 30


def superlink_from_afar(address: str, ca: Path) -> Iterator[Check]:
    """A feature party's way to the SuperLink: TCP, TLS under the party's own CA, and the clock."""
    host, port = split_address(address)
    try:
        answer = probe_https("the SuperLink", host, port, ca.read_text())
    except PeerError as problem:
        found = f"{address}: {problem.what} ({problem.got})"
        yield Check("superlink", "FAIL", found, problem.fix or "")
        yield Check("clock", "WARN", "not measured: the SuperLink did not answer")
    else:
        yield Check("superlink", "OK", f"{address} answers in {answer.connect_s * 1e3:.1f} ms, TLS")
        yield _clock(answer)


def superlink_here(address: str, bind_host: str, ca: Path) -> Iterator[Check]:
    """The label party's own SuperLink: its port is free, or it is ours that listens."""
    host, port = split_address(address)
    if port_is_free(bind_host or host, port):
        yield Check("superlink port", "OK", f"{port} is free; vfl superlink will listen there")
        return
    local = "127.0.0.1" if bind_host in ("0.0.0.0", "::") else host
    try:
        answer = probe_https("the SuperLink", local, port, ca.read_text())
    except PeerError:
        found = f"{port} is used by something that does not show our certificate"
        yield Check("superlink port", "FAIL", found, "end that program, or change superlink's port")
        return
    yield Check("superlink port", "OK", f"our SuperLink listens on {port}")
    yield _clock(answer)


def stream_port(host: str, bind_host: str, port: int) -> Check:
    """Where the label party's process will listen during a session."""
    if port == 0:
        found = "0: a free one each session"
        cure = "set federation.stream_port where a firewall must let it through"
        return Check("stream port", "OK", found, cure)
    if port_is_free(bind_host or host, port):
        return Check("stream port", "OK", f"{port} is free")
    found = f"{port} is in use, by a running session or by another program"
    return Check("stream port", "WARN", found, "a session that runs now is well; else change it")


def _clock(answer: Probe) -> Check:
    if answer.clock_s is None:
        return Check("clock", "WARN", "not measured: the answer had no date")
    way = "behind" if answer.clock_s > 0 else "ahead of"
    found = f"{abs(answer.clock_s):.0f} s {way} the peer's"
    if abs(answer.clock_s) > CLOCK_TOLERANCE_S:
        cure = f"set the clocks: Flower refuses nodes that are {CLOCK_TOLERANCE_S} s off"
        return Check("clock", "FAIL", found, cure)
    if abs(answer.clock_s) > _CLOCK_WARNING_S:
        cure = f"set the clocks before they are {CLOCK_TOLERANCE_S} s apart"
        return Check("clock", "WARN", found, cure)
    return Check("clock", "OK", found)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host may stand in brackets.

    Raises:
        UserError: the text is of another form.
    """
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise UserError("this is not the address of a SuperLink", got=address, want="host:port")
    return host.strip("[]"), int(port)
