"""What a party keeps of a training: the plan, and at P0 and P1 a share bound to that training.

party.json           who this was, the plan all three agreed on, what the outputs stand for, and
                     the encoder's SHA-256
share.safetensors    P0's or P1's share of every weight; which training and role, in its header
encoder.json         what turned this party's table into columns
predictions.csv      where the labels are: the answers for the last new rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import Tensor

from vfl.core.errors import RunFolderError
from vfl.core.storage import (
    Seal,
    load_weights,
    read_sealed_json,
    save_weights,
    write_sealed_json,
    write_text,
)
from vfl.datasets import Encoder, PartyData, read_encoder
from vfl.mpc.rules import NAMES, P2
from vfl.server.summary import write_predictions
from vfl.triple.plan import Plan, Task, Terms
from vfl.triple.program import Outcome

_PARTY = "party.json"
_SHARE = "share.safetensors"
_ENCODER = "encoder.json"
_ANSWERS = "predictions.csv"


class Kept(NamedTuple):
    """What one party brings.

    Attributes:
        terms: of an inference with its network, or of a new training.
        shares: ring words by layer; empty at P2, and before a training.
        encoder: for a prediction, what turned its table into columns; None without columns.
        classes: for a prediction, what the outputs stand for; None without labels, and for numbers.
    """

    terms: Terms
    shares: Mapping[str, Tensor]
    encoder: Encoder | None = None
    classes: tuple[str | int, ...] | None = None


def keep(
    folder: Path, role: int, plan: Plan, shares: Mapping[str, Tensor], data: PartyData | None
) -> None:
    """Write one party's part; only its owner can read the share and the encoder."""
    if shares:
        save_weights(folder / _SHARE, shares, _seal("share", role, plan.training))
    about: dict[str, Any] = {"name": plan.parties[role]}
    if data is not None and data.encoder is not None:
        text = data.encoder.to_json()
        write_text(folder / _ENCODER, text)
        about["encoder"] = _digest(text)
    if data is not None and data.classes is not None:
        about["classes"] = list(data.classes)
    record = about | {"plan": plan.model_dump(mode="json")}
    write_sealed_json(folder / _PARTY, record, _seal("private network", role, plan.training))


def keep_answers(folder: Path, data: PartyData | None, outcome: Outcome) -> None:
    """Write what a prediction told this party, if it was told anything."""
    if data is None or outcome.outputs is None:
        return
    path = folder / _ANSWERS
    write_predictions(path, data, [outcome.outputs], data.classes)
    outcome.predictions = str(path)


def kept_at(folder: Path, role: int, task: Task = "infer") -> Kept:
    """Read what `keep` wrote, for what comes next.

    Raises:
        RunFolderError: it is not there, in another format, another role's, or of two trainings;
            or for a prediction, nothing was kept that reads new rows.
    """
    path = folder / _PARTY
    if not path.is_file():
        raise RunFolderError(
            f"no private network of {NAMES[role]} is here",
            where=str(folder),
            want=_PARTY,
            fix="give the folder that vfl mpc wrote at this party",
        )
    record = read_sealed_json(path, _seal("private network", role, None))
    try:
        plan = Plan.model_validate(record.get("plan"))
    except ValidationError:
        raise RunFolderError("this is no plan of a private network", where=str(path)) from None
    asked = {name: getattr(plan, name) for name in Terms.model_fields} | {"task": task}
    terms = Terms(**asked)
    shares: Mapping[str, Tensor] = {}
    if role != P2:
        shares = load_weights(folder / _SHARE, _seal("share", role, plan.training))
    if task != "predict":
        return Kept(terms, shares)
    return Kept(terms, shares, _encoder(folder, role, record), _classes(path, role, plan, record))


def _encoder(folder: Path, role: int, record: Mapping[str, Any]) -> Encoder | None:
    """What reads a holder's new rows: of this training, or its columns would mean others."""
    if role == P2:
        return None
    path = folder / _ENCODER
    if not path.is_file():
        raise RunFolderError(
            f"{NAMES[role]} kept nothing that turns a table into columns",
            where=str(folder),
            want=_ENCODER,
            fix="train again, with a table of columns; a data set of pictures by name has none",
        )
    text = path.read_text(errors="replace")
    _check(path, "training", _digest(text), str(record.get("encoder")))
    return read_encoder(text)


def _classes(
    path: Path, role: int, plan: Plan, record: Mapping[str, Any]
) -> tuple[str | int, ...] | None:
    """What the outputs stand for, at the party that is told them."""
    if role != plan.label_role or not plan.classes:
        return None
    named = record.get("classes")
    if not isinstance(named, list) or len(named) != plan.classes:
        raise RunFolderError(
            "it is not known what the outputs stand for",
            where=str(path),
            want=f"{plan.classes} classes",
            fix="put back what the training kept, or train again",
        )
    return tuple(named)


def _seal(kind: str, role: int, training: str | None) -> Seal:
    """Of a part of one training's network; its owner is a role, for shares are of roles."""
    return Seal(kind, NAMES[role], training)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check(path: Path, what: str, got: object, want: str) -> None:
    if got != want:
        raise RunFolderError(
            f"this belongs to another {what}",
            where=str(path),
            got=str(got)[:12] if got else f"no {what}",
            want=want[:12],
            fix="put back the files of one party and one training; parts of two do not add up",
        )
