"""What a party keeps of a training: the plan, and at P0 and P1 a share bound to that training.

party.json           who this was, and the plan all three agreed on
share.safetensors    P0's or P1's share of every weight; which training and role, in its header
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from torch import Tensor

from vfl.errors import RunFolderError
from vfl.mpc.rules import NAMES
from vfl.storage import (
    check_format,
    load_weights,
    pack_weights,
    read_json,
    read_notes,
    stamp,
    write_bytes,
    write_json,
)
from vfl.triple.plan import Plan, Terms

_PARTY = "party.json"
_SHARE = "share.safetensors"


class Kept(NamedTuple):
    """What one party brings.

    Attributes:
        terms: of an inference with its network, or of a new training.
        shares: ring words by layer; empty at P2, and before a training.
    """

    terms: Terms
    shares: Mapping[str, Tensor]


def keep(folder: Path, role: int, plan: Plan, shares: Mapping[str, Tensor]) -> None:
    """Write one party's part; only its owner can read the share."""
    if shares:
        notes = {"training": plan.training, "role": NAMES[role]}
        write_bytes(folder / _SHARE, pack_weights(shares, notes), mode=0o600)
    about = {"role": NAMES[role], "party": plan.parties[role]}
    write_json(folder / _PARTY, stamp() | about | {"plan": plan.model_dump(mode="json")})


def kept_at(folder: Path, role: int) -> Kept:
    """Read what `keep` wrote.

    Raises:
        RunFolderError: it is not there, in another format, another role's, or of two trainings.
    """
    path = folder / _PARTY
    if not path.is_file():
        raise RunFolderError(
            f"no private network of {NAMES[role]} is here",
            where=str(folder),
            want=_PARTY,
            fix="give the folder that vfl mpc wrote at this party",
        )
    record = read_json(path)
    check_format(record, path)
    try:
        plan = Plan.model_validate(record.get("plan"))
    except ValidationError:
        raise RunFolderError("this is no plan of a private network", where=str(path)) from None
    _check(path, "role", record.get("role"), NAMES[role])
    asked = {name: getattr(plan, name) for name in Terms.model_fields} | {"task": "infer"}
    terms = Terms(**asked)
    if role == 2:
        return Kept(terms, {})
    share = folder / _SHARE
    shares, notes = load_weights(share), read_notes(share)
    _check(share, "role", notes.get("role"), NAMES[role])
    _check(share, "training", notes.get("training"), plan.training)
    return Kept(terms, shares)


def _check(path: Path, what: str, got: object, want: str) -> None:
    if got != want:
        raise RunFolderError(
            f"this belongs to another {what}",
            where=str(path),
            got=str(got)[:12] if got else f"no {what}",
            want=want[:12],
            fix="put back the files of one party and one training; parts of two do not add up",
        )
