"""SPU's private set intersections, for all parties in one process.

SPU (Ma et al. 2023) needs another numpy than vfl, so it has a Python of its own, named by the
environment variable VFL_SPU_PYTHON. Between parties on several machines it would open sockets of
its own, beside the one door of a session: there it is refused.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vfl.core.errors import ConfigError, MissingPackageError, ProtocolError
from vfl.core.registry import require_choice
from vfl.datasets.alignment.protocols import (
    Own,
    WholeProtocol,
)
from vfl.datasets.alignment.tags import KEY_BYTES, TAG_BYTES, tags_of

PYTHON = "VFL_SPU_PYTHON"
_KINDS = {"rr22": "PROTOCOL_RR22", "ecdh": "PROTOCOL_ECDH", "kkrt": "PROTOCOL_KKRT"}
_OF_MANY = {"ecdh": "PROTOCOL_ECDH_NPC", "kkrt": "PROTOCOL_KKRT_NPC"}
_SIDE = Path(__file__).with_name("spu_side.py")
_WAIT_S = 3600


class Spu(WholeProtocol):
    """SPU's RR22 (Raghuraman and Rindal 2022), Diffie-Hellman on Curve25519, or KKRT (2016).

    RR22 is for two parties; the others are for any number. Its mode of little communication, which
    loses common ids, is not used.

    Learned: of two parties both, how many ids the other one has, and the common ids; of several,
    the first party also what each step of SPU's own protocol of many shows it. SPU tells the result
    to all at once: it asks for no consent in between.

    Args:
        pad: see `Protocol`.
        kind: rr22, ecdh or kkrt.
    """

    refused = (
        "opens sockets of its own, beside the session's, and tells the label party the result "
        "before others accept"
    )

    def __init__(self, pad: int = 0, kind: str = "rr22") -> None:
        super().__init__(pad)
        require_choice("kind", kind, sorted(_KINDS))
        self.kind = kind

    def find(self, owns: Sequence[Own]) -> dict[str, np.ndarray]:
        kinds = _KINDS if len(owns) == 2 else _OF_MANY
        if self.kind not in kinds:
            raise ConfigError(
                f"SPU's {self.kind} finds the common rows of two parties",
                got=f"{len(owns)} parties",
                fix="-s align.protocol=spu:kind=ecdh",
            )
        key = secrets.token_bytes(KEY_BYTES)  # SPU's files hold no id
        sets = [
            [bytes(tag).hex() for tag in tags_of(own.ids, key)]
            + [os.urandom(TAG_BYTES).hex() for _ in range(self.dummies(own))]
            for own in owns
        ]
        found = _run(kinds[self.kind], sets) if all(sets) else [[] for _ in sets]  # SPU would wait
        parties = [own.party for own in owns]
        rows = {
            party: np.array(each, dtype=np.int64)
            for party, each in zip(parties, found, strict=True)
        }
        for own in owns:
            if len(rows[own.party]) and rows[own.party].max() >= len(own.ids):
                raise ProtocolError("SPU calls an item common that stands for no id")
        return rows


def available() -> bool:
    """Whether a Python with SPU is named."""
    return bool(os.environ.get(PYTHON))


def _run(protocol: str, sets: list[list[str]]) -> list[list[int]]:
    """What `spu_side.py` found; its log is dropped."""
    python = os.environ.get(PYTHON)
    if not python:
        raise MissingPackageError(
            "this alignment needs SPU, in a Python of its own",
            fix="python -m venv spu; spu/bin/pip install spu==0.9.5; "
            f"export {PYTHON}=spu/bin/python",
        )
    with tempfile.TemporaryDirectory(prefix="vfl-spu-") as folder:  # for its owner alone
        try:
            subprocess.run(
                [Path(python).absolute(), "-I", _SIDE, protocol, folder],
                input=json.dumps(sets),
                capture_output=True,
                text=True,
                cwd=folder,
                env={**os.environ, "TMPDIR": folder},
                timeout=_WAIT_S,
            )
            found: list[list[int]] = json.loads((Path(folder) / "rows.json").read_text())
        except (OSError, subprocess.TimeoutExpired, ValueError) as problem:
            raise MissingPackageError(
                "SPU gave no answer",
                where=PYTHON,
                got=type(problem).__name__,
                fix=f"try it alone: {python} -c 'import spu.psi'",
            ) from None
    return found
