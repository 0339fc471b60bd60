"""`vfl.record`: recording of a module's training in the caller's own training loop.

Frames are stored as the bytes that were sent, as in the trace of a run. A digest of a party's
inputs identifies a row, so the order of batches does not matter. If the inputs of a row change in
each pass, as with augmented images, the caller's argument `rows` (positions in a table) identifies
a row. A new epoch begins when a row occurs again.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression import Codec, StepContext
from vfl.core.errors import DataError, SpecError
from vfl.core.frame import Kind
from vfl.core.storage import weights_digest
from vfl.session.trace import TRAINING, Recorded, Replayed, Trace
from vfl.training.cutting import CutModel
from vfl.training.fitting import columns_of, row_digests
from vfl.training.split import Crossings, crossings_of

#: Position that stands for every row outside of the caller's rows; this number is larger than all
#: other positions.
_ELSEWHERE = 2**62


@dataclass(frozen=True, eq=False)
class _Step:
    """The rows of one forward pass of the module.

    Attributes:
        inputs: digest of each row of each party's inputs, by party.
        rows: positions of the rows in the caller's table; None if the caller gave no positions.
    """

    inputs: Mapping[str, Sequence[int]]
    rows: np.ndarray | None


class ModuleTrace:
    """Recorded frames of a module's training, for attacks on this training; see `record`.

    Args:
        model: the module.
        limit_bytes: largest size of the recording in bytes; a longer recording raises an error
            before memory is full.

    Attributes:
        frames: all frames of the recorded training, as the bytes that were sent.
    """

    def __init__(self, model: nn.Module, limit_bytes: int = 2**31) -> None:
        self.frames = Trace(TRAINING, limit_bytes=limit_bytes)
        self._model = crossings_of(model)
        self._began: dict[str, Codec] = {}
        self._steps: dict[int, _Step] = {}
        self._open: ExitStack | None = None
        self._ended_with = ""

    def __enter__(self) -> Self:
        """Start recording.

        Raises:
            SpecError: rows of the module's cuts are tokens, which do not have one label each.
        """
        model = self._model
        if isinstance(model, CutModel) and not model.by_row:
            raise SpecError(
                "a recorded training needs one label per row of a cut, but these rows are tokens",
                want="a module cut with row_axes=1",
            )
        self._began = {name: copy.deepcopy(codec) for name, codec in model.codecs.items()}
        self._open = ExitStack()

        def note(called: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if called is model and model.training:  # copies of the module have the same hook
                self._note(args, named)

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        self._open.callback(hook.remove)
        self._open.enter_context(model.observed_by(self.frames))
        return self

    def __exit__(self, *error: object) -> None:
        """Stop recording, and store a digest of the module's weights at the end of the training."""
        if self._open is not None:
            self._open.close()
        self._ended_with = module_digest(self._model)

    def require_of(self, model: Crossings) -> None:
        """Reject a module that is not the recorded module, its copy, or a module with its weights.

        Raises:
            DataError: the trace belongs to another module's training.
        """
        if model.lineage != self._model.lineage and module_digest(model) != self._ended_with:
            raise DataError(
                "this trace belongs to another module's training",
                where="trace",
                got="a module with another origin, and with other weights than at the trace's end",
                want="the module that was trained in the block 'with vfl.record(model) as trace:', "
                "a copy or an average of it, or a module with its final weights",
            )

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def digest(self) -> str:
        """Return a digest of all recorded frames."""
        digest = hashlib.sha256()
        for one in self.frames:
            digest.update(f"{one.party}|{one.direction}|{one.step}|{len(one.payload)}|".encode())
            digest.update(one.payload)
        return digest.hexdigest()

    def decoded(
        self, party: str, inputs: Sequence[int], rows: Sequence[int] | None = None
    ) -> list[tuple[Replayed, Tensor]]:
        """Return the frames of one party's cuts, with each frame's rows and decoded values.

        Forward passes without a backward pass are left out.

        Args:
            party: the feature party.
            inputs: digests of the party's inputs for the rows of interest; a row's number in the
                result is its position in this list. All rows outside of this list get a larger
                number.
            rows: positions of the same rows (of interest) in the caller's table.

        Raises:
            DataError: the training used none of these rows.
        """
        frames = [one for one in self.frames if one.party == party]
        ended = {one.step for one in frames if one.kind is Kind.GRAD}
        places = self._places(party, [step for step in self._steps if step in ended], inputs, rows)
        decode = _Replay(self._began[party], self._model.experiment.parties[party].width)
        found = []
        for one in frames:
            if one.step in places:
                epoch, own = places[one.step]
                frame = Replayed(
                    one.party, one.direction, one.kind, one.step, one.payload,
                    phase="train", epoch=epoch, rows=own,
                )  # fmt: skip
                found.append((frame, decode.values(one, self._steps[one.step].rows, len(own))))
        return found

    def _note(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store the rows that a forward pass uses."""
        model = self._model
        inputs, rows = _given(model, args, named)
        own: dict[str, list[int]] = {}
        for party in model.experiment.parties:
            columns = columns_of(model, party, inputs)[0]
            # For the party in the middle of a U-shape, the rows are the feature party's rows; the
            # feature party comes first.
            own[party] = list(row_digests(columns.values())) if columns else own[next(iter(own))]
        positions = None if rows is None else torch.as_tensor(rows).long().cpu().numpy()
        self._steps[model.step] = _Step(own, positions)

    def _places(
        self, party: str, steps: Iterable[int], inputs: Sequence[int], rows: Sequence[int] | None
    ) -> dict[int, tuple[int, np.ndarray]]:
        """Return the epoch and the rows' positions of each training step, by step."""
        keys = {step: self._steps[step].inputs[party] for step in steps}
        known = _positions(inputs)
        by_rows = all(self._steps[step].rows is not None for step in keys) and rows is not None
        if by_rows and not any(one in known for own in keys.values() for one in own):
            assert rows is not None
            known = _positions(rows)
            keys = {step: _listed(self._steps[step].rows) for step in keys}
        found, epoch, had = {}, 1, Counter[int]()
        for step, own in keys.items():
            batch = Counter(own)
            if any(had[one] + count > len(known.get(one, [0])) for one, count in batch.items()):
                epoch, had = epoch + 1, Counter()
            places = []
            for one in own:
                mine = known.get(one, [_ELSEWHERE])
                places.append(mine[min(had[one], len(mine) - 1)])
                had[one] += 1
            found[step] = epoch, np.array(places, np.int64)
        if not any((places < _ELSEWHERE).any() for _, places in found.values()):
            raise DataError(
                "the training used none of the loader's rows",
                where="trace",
                got=f"{len(found)} steps, rows of the loader that no step was about",
                want="the loader of the training, whose rows are the same in each pass",
                fix="where rows are drawn anew, as of augmented pictures: model(inputs, rows=...) "
                "in the training, and 'rows' in the batches, which are dicts",
            )
        return found


def module_digest(model: Crossings) -> str:
    """Return a digest of a module's weights and buffers."""
    state = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    return weights_digest(state)


def _listed(rows: np.ndarray | None) -> list[int]:
    return [] if rows is None else rows.tolist()


def _positions(keys: Iterable[int]) -> dict[int, list[int]]:
    """Return the positions at which each key occurs in `keys`."""
    found: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return dict(found)


def _given(model: Crossings, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the inputs and the positions of rows with which the caller called the module."""
    if isinstance(model, CutModel):
        return model.arguments(args, named), named.get("rows")
    inputs, _, rows = (*args, None, None, None)[:3]
    return named.get("inputs", inputs), named.get("rows", rows)


class _Replay:
    """Decodes the frames of one cut in their original order, with the states that the codec had.

    Args:
        codec: codec with its state at the start of the recording.
        width: width of the cut.
    """

    def __init__(self, codec: Codec, width: int) -> None:
        self._codec, self._width = codec, codec.wire_width(width)
        self._saved: dict[int, Any] = {}

    def values(self, frame: Recorded, rows: np.ndarray | None, count: int) -> Tensor:
        """Return the values that the receiver decoded from a frame, axes (rows, width)."""
        context = StepContext(frame.step, training=True, rows=rows)
        if frame.kind is Kind.CUT:
            cut, self._saved[frame.step] = self._codec.decode(
                frame.payload, count, self._width, context
            )
            return cut
        kept = self._codec.encoder_state(self._saved.pop(frame.step))
        grad = self._codec.decode_grad(frame.payload, kept, count, self._width, context)
        self._codec.commit(frame.step)
        return grad


def record(model: nn.Module, limit_bytes: int = 2**31) -> ModuleTrace:
    """Record the frames between parties while a module is trained in a `with` block.

    With this trace, `vfl.attack(model, loader, trace=trace, pack=...)` runs attacks; each attacker
    receives the part of the training that the attacker's threat model grants.

    Args:
        model: a `SplitModule` or the result of `vfl.split`, possibly inside a torch wrapper.
        limit_bytes: largest total size of the recorded frames in bytes; a training that sends more
            raises an error.

    >>> from vfl.training.cutting import split
    >>> rows, labels = torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> model = split(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "0", rows)
    >>> with record(model) as trace:
    ...     nn.functional.cross_entropy(model(rows), labels).backward()
    >>> len(trace)
    2

    Raises:
        SpecError: rows of the cuts are tokens; the error is raised when the block is entered.
    """
    return ModuleTrace(model, limit_bytes)


__all__ = ["ModuleTrace", "record"]
