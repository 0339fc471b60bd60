"""Batches of a caller's loader, and a plain training loop for modules that have no other.

A batch is `(inputs, labels)`, `(image, table, labels)`, or a dict with `labels`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from vfl.core.errors import DataError
from vfl.core.registry import require_range
from vfl.training.cutting import CutModel
from vfl.training.split import Crossings, arguments_of


def labelled(batch: Any) -> tuple[Any, Tensor]:
    """A batch's inputs and labels: the last of a tuple, or what a dict calls labels.

    Raises:
        DataError: it has none.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return {name: one for name, one in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) > 1 and isinstance(batch[-1], Tensor):
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    raise DataError(
        "a batch has no labels",
        where="the loader",
        got=f"a {type(batch).__name__}",
        want="a tuple (inputs, ..., labels), or a dict with 'labels'",
    )


def moved(value: Any, device: torch.device) -> Any:
    """The same with tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(moved(one, device) for one in value)
    return value


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model's weights are."""
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def answered(model: Crossings, inputs: Any, labels: Tensor | None = None) -> Any:
    """What a module answers for the inputs of a batch.

    Args:
        model: the module.
        inputs: what it takes; a tuple has one entry for each party of a `SplitModule`, in its
            order. Of a dict, `rows` are positions of the rows in a table, unless the model itself
            has an argument of that name.
        labels: of the rows.
    """
    inputs, rows = apart(inputs)
    if isinstance(model, CutModel):
        args, named = arguments_of(inputs)
        return model(*args, labels=labels, rows=rows, **named)
    return model(by_party(model, inputs), labels, rows)


def apart(inputs: Any) -> tuple[Any, Any]:
    """Inputs without `rows`, and those; None of inputs that are no dict, or have none."""
    if not isinstance(inputs, Mapping) or "rows" not in inputs:
        return inputs, None
    return {name: one for name, one in inputs.items() if name != "rows"}, inputs["rows"]


def by_party(model: Crossings, inputs: Any) -> Any:
    """Inputs of a `SplitModule` by party; a tuple has one entry for each, in its order."""
    parties = list(model.experiment.parties)
    if isinstance(inputs, tuple) and len(inputs) == len(parties):
        return dict(zip(parties, inputs, strict=True))
    return {parties[0]: inputs} if isinstance(inputs, Tensor) and len(parties) == 1 else inputs


def columns_of(
    model: Crossings, party: str, inputs: Any
) -> tuple[dict[str | int, Tensor], dict[str, Tensor], bool]:
    """One party's tensors of a batch, by argument, and those of others that its layers run with.

    Args:
        model: the module.
        party: the feature party.
        inputs: what the module takes.

    Returns:
        Tensors of the party that have a row of axis 0 each; other parties' arguments of a whole
        model; and whether the party is given something besides, such as the edges of a graph.
    """
    inputs, _ = apart(inputs)
    if isinstance(model, CutModel):
        args, named = arguments_of(inputs)
        by_name, mine = model.arguments(args, named), model.inputs_of(party)
        own: dict[str | int, Any] = {name: one for name, one in by_name.items() if name in mine}
        others = {name: one for name, one in by_name.items() if name not in mine}
    else:
        args, named = arguments_of(by_party(model, inputs)[party])
        own, others = dict(enumerate(args)), {}
        own.update(named.items())
    tensors = {name: one for name, one in own.items() if isinstance(one, Tensor)}
    rows = len(next(iter(tensors.values())))
    by_row = {name: one for name, one in tensors.items() if len(one) == rows and not one.is_sparse}
    rest = {name: one for name, one in others.items() if isinstance(one, Tensor)}
    shared = len(by_row) < len(own) or any(len(one) != rows for one in rest.values())
    return by_row, rest, shared or len(rest) < len(others)


def row_digests(tensors: Iterable[Tensor]) -> Iterator[int]:
    """A number of 63 bits for each row of some tensors together; equal for equal bytes."""
    joined = np.concatenate([_bytes_of(one) for one in tensors], 1)
    for row in joined:
        yield int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "big") >> 1


def _bytes_of(values: Tensor) -> np.ndarray:
    """Axes (rows, bytes)."""
    dense = values.to_dense() if values.layout is not torch.strided else values
    flat = dense.detach().cpu().reshape(len(dense), -1).contiguous()
    return flat.view(torch.uint8).numpy()


def loss_of(outputs: Any, labels: Tensor, task: str) -> Tensor:
    """The loss that a model computed itself, else cross-entropy, or the mean squared error.

    Args:
        outputs: logits of axes (rows, classes) or (rows, tokens, classes), or numbers of axes
            (rows,) or (rows, 1); or an object that has them as `logits`, and its own loss as
            `loss`, as models of Hugging Face give it.
        labels: axes of the outputs without the last one.
        task: "classification" or "regression".
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    logits: Tensor = getattr(outputs, "logits", outputs)
    if task == "regression":
        return mse_loss(logits.reshape(labels.shape).float(), labels.float())
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def fit(
    model: Crossings,
    loader: Iterable[Any],
    epochs: int = 10,
    learning_rate: float = 1e-3,
    on_epoch: Callable[[dict[str, float]], None] = lambda record: None,
) -> None:
    """Train a module with Adam on the loss that fits its task; what it adds to the loss included.

    Args:
        model: the module.
        loader: gives batches, anew for each epoch.
        epochs: passes over the loader.
        learning_rate: of Adam (Kingma and Ba 2015).
        on_epoch: gets `epoch`, `seconds`, `train_loss` and bytes of both directions so far.

    Raises:
        DataError: a batch has no labels, or the loader gives none.

    >>> from torch import nn
    >>> from vfl.training.cutting import split
    >>> rows = torch.eye(4)
    >>> model = split(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "0", rows)
    >>> fit(model, [(rows, torch.tensor([0, 1, 0, 1]))], epochs=2)
    >>> model.step
    2
    """
    require_range("epochs", epochs, 1, 1_000_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    device = device_of(model)
    for epoch in range(1, epochs + 1):
        began, losses, rows = time.perf_counter(), 0.0, 0
        model.train()
        for batch in loader:
            inputs, labels = moved(labelled(batch), device)
            loss = loss_of(answered(model, inputs, labels), labels, model.task)
            optimizer.zero_grad()
            whole = loss + model.extra_loss()
            whole.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses, rows = losses + float(loss.detach()) * len(labels), rows + len(labels)
        if not rows:
            raise DataError("the loader gives no batch", where="the loader", got=f"epoch {epoch}")
        record = {"epoch": epoch, "seconds": round(time.perf_counter() - began, 3)}
        if math.isfinite(mean := losses / rows):
            record["train_loss"] = mean
        sent = {way: model.ledger.total_bytes(way.removeprefix("bytes_")) for way in _WAYS}
        on_epoch(record | sent)


_WAYS = ("bytes_up", "bytes_down")
