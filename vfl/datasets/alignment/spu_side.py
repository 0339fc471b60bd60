"""All parties of an intersection by SPU: ``PYTHON -I spu_side.py PROTOCOL FOLDER``.

It runs in the Python that has SPU and imports nothing of vfl. Sets come as JSON on the standard
input; the rows of each party that are common, in one order, go as JSON to FOLDER/rows.json, for SPU
prints a log. The parties are threads that talk through memory: no socket is opened.
"""

import csv
import json
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

_WAIT_MS = 3_600_000


def play(protocol: str, folder: Path, sets: list[list[str]]) -> list[list[int]]:
    """Rows of each set that all have, in one order."""
    lib, psi = import_module("spu.libspu"), import_module("spu.psi")
    desc = lib.link.Desc()
    desc.recv_timeout_ms = _WAIT_MS
    for rank in range(len(sets)):
        desc.add_party(f"P{rank}", f"memory{rank}")
    found: dict[int, list[int]] = {}

    def side(rank: int) -> None:
        found[rank] = _side(lib, psi, desc, rank, protocol, folder, sets[rank])

    threads = [threading.Thread(target=side, args=(rank,)) for rank in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(sets))]


def _side(
    lib: Any, psi: Any, desc: Any, rank: int, protocol: str, folder: Path, ids: list[str]
) -> list[int]:
    source, result = folder / f"{rank}.csv", folder / f"{rank}.out"
    source.write_text("id,row\n" + "".join(f"{each},{row}\n" for row, each in enumerate(ids)))
    config = psi.PsiExecuteConfig(
        protocol_conf=psi.PsiProtocolConfig(
            protocol=getattr(psi.PsiProtocol, protocol),
            receiver_rank=0,
            broadcast_result=True,
            ecdh_params=psi.EcdhParams(curve=psi.EllipticCurveType.CURVE_25519),
        ),
        input_params=psi.InputParams(path=str(source), selected_keys=["id"], keys_unique=True),
        output_params=psi.OutputParams(path=str(result)),
    )
    psi.psi_execute(config, lib.link.create_mem(desc, rank))
    with result.open(newline="") as file:
        return [int(row["row"]) for row in csv.DictReader(file)]


if __name__ == "__main__":
    rows = play(sys.argv[1], Path(sys.argv[2]), json.load(sys.stdin))
    (Path(sys.argv[2]) / "rows.json").write_text(json.dumps(rows))
