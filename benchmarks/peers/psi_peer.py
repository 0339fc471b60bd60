"""Private set intersection of other systems: ``PYTHON -I psi_peer.py SYSTEM IDS`` prints JSON.

This program runs in an environment that has the other system, and imports no part of vfl. Both
parties are on this machine; half of their ids are common.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_WAIT_MS = 600_000


def ids_of(rank: int, count: int) -> list[str]:
    """Return the ids of one party, the same ids as in `benchmarks.psi`."""
    first = rank * (count - count // 2)
    return [f"person-{number:09d}" for number in range(first, first + count)]


def openmined(count: int) -> dict[str, Any]:
    """Run both parties in this process with uncompressed sets, which have no false positives."""
    psi = import_module("private_set_intersection.python")
    left, right = ids_of(0, count), ids_of(1, count)
    began, cpu = time.perf_counter(), time.process_time()
    server, client = psi.server.CreateWithNewKey(True), psi.client.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(1e-9, count, right, psi.DataStructure.RAW)
    request = client.CreateRequest(left)
    response = server.ProcessRequest(request)
    common = client.GetIntersection(setup, response)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    sent = sum(message.ByteSize() for message in (setup, request, response))
    return {"seconds": seconds, "cpu_s": cpu, "party_bytes": sent, "common": len(common)}


def spu(protocol: str, count: int) -> dict[str, Any]:
    """Run two processes over the loopback interface."""
    with tempfile.TemporaryDirectory() as folder:
        ports = _free_ports(2)
        ends, processes = [], []
        for rank in range(2):
            mine, theirs = multiprocessing.Pipe()
            task = (rank, protocol, count, ports, folder, theirs)
            processes.append(multiprocessing.Process(target=_spu_side, args=task))
            processes[-1].start()
            ends.append(mine)
        found = [end.recv() for end in ends]
        for process in processes:
            process.join()
    return {
        "seconds": max(each["seconds"] for each in found),
        "cpu_s": sum(each["cpu_s"] for each in found),
        "party_bytes": None,  # the library does not count the bytes of its links
        "common": found[0]["common"],
    }


def _spu_side(
    rank: int, protocol: str, count: int, ports: list[int], folder: str, parent: Any
) -> None:
    lib, psi = import_module("spu.libspu"), import_module("spu.psi")
    source = Path(folder) / f"{rank}.csv"
    source.write_text("id\n" + "".join(f"{each}\n" for each in ids_of(rank, count)))
    desc = lib.link.Desc()
    desc.recv_timeout_ms = _WAIT_MS
    for index, port in enumerate(ports):
        desc.add_party(f"P{index}", f"127.0.0.1:{port}")
    link = lib.link.create_brpc(desc, rank)
    config = psi.PsiExecuteConfig(
        protocol_conf=psi.PsiProtocolConfig(
            protocol=getattr(psi.PsiProtocol, protocol),
            receiver_rank=0,
            broadcast_result=True,
            ecdh_params=psi.EcdhParams(curve=psi.EllipticCurveType.CURVE_25519),
        ),
        input_params=psi.InputParams(path=str(source), selected_keys=["id"], keys_unique=True),
        output_params=psi.OutputParams(path=str(source.with_suffix(".out"))),
    )
    began, cpu = time.perf_counter(), time.process_time()
    report = psi.psi_execute(config, link)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    parent.send({"seconds": seconds, "cpu_s": cpu, "common": report.intersection_count})
    link.stop_link()


def _free_ports(count: int) -> list[int]:
    with_port = [socket.socket() for _ in range(count)]
    for one in with_port:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in with_port]
    for one in with_port:
        one.close()
    return ports


def main() -> None:
    """Measure one system once."""
    system, count = sys.argv[1], int(sys.argv[2])
    if system == "openmined":
        found = openmined(count)
    else:
        found = spu({"spu-ecdh": "PROTOCOL_ECDH", "spu-rr22": "PROTOCOL_RR22"}[system], count)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
