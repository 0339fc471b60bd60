"""The training cuts of a trace as one, to try other codecs on."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl.errors import DataError, UserError, nearest
from vfl.trace.replay import Recording
from vfl.trace.size import links_of


def training_cuts(recording: Recording, party: str | None = None) -> Tensor:
    """What one feature party sent in training, decoded, in the order of the steps.

    A lossy codec has left its mark on it, and one with a module made it as wide as that module.

    Args:
        recording: a trace.
        party: the feature party; it may be left out where there is only one.

    Returns:
        The cuts below each other, float32 of axes (rows, width).

    Raises:
        UserError: no such party, or several to choose from.
        DataError: no training frames were recorded.
        SpecError, FrameError, RunFolderError: see `Recording.decoded`.
    """
    party = _chosen(links_of(recording.terms, recording.party), party)
    cuts = [cut for _, cut in recording.decoded(phase="train", party=party, direction="up")]
    if not cuts:
        raise DataError(
            "this trace holds no training cuts",
            got=f"phases {', '.join(recording.settings.phases)}",
            fix="train with -s trace.phases=train",
        )
    return torch.cat(cuts)


def _chosen(known: list[str], party: str | None) -> str:
    if party is None and len(known) == 1:
        return known[0]
    if party is None:
        raise UserError(
            "this trace holds the cuts of several parties",
            got=", ".join(known),
            want="one of them",
            fix=f"--party {known[0]}",
        )
    if party not in known:
        raise UserError(
            f"this trace holds no cuts of '{party}'",
            want=", ".join(known),
            fix=nearest(party, known),
        )
    return party
