"""Batches of a caller's data loader, and an ordinary training loop for split modules.

A batch is `(inputs, labels)`, `(image, table, labels)`, or a dict with `labels`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from vfl.config import TrainSettings
from vfl.config.toml import check
from vfl.core.errors import ConfigError, DataError, nearest
from vfl.models.losses import make_loss
from vfl.models.optimizers import Optimization
from vfl.session import EarlyStopping, Exchange
from vfl.session.label.quality import classification_quality, regression_quality
from vfl.training.cutting import CutModel, entry_of
from vfl.training.split import Crossings, SplitModule, arguments_of, crossings_of


def labelled(batch: Any) -> tuple[Any, Tensor]:
    """Return a batch's inputs and labels (a tuple's last entry, or a dict's `labels`).

    Raises:
        DataError: the batch has no labels.
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


def one_a_row(labels: Tensor) -> Tensor:
    """Return labels with axes (rows, 1) as axes (rows,), and other labels unchanged."""
    return labels[:, 0] if labels.dim() == 2 and labels.shape[1] == 1 else labels


def moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or a tuple, list or dict that contains tensors, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return tuple(moved(one, device) for one in value)
    return value


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model's weights are."""
    return next((one.device for one in model.parameters()), torch.device("cpu"))


def answered(model: nn.Module, inputs: Any, labels: Tensor | None = None) -> Any:
    """Return a module's outputs for the inputs of a batch.

    Args:
        model: the split module, compiled or not.
        inputs: the module's inputs; a tuple has one entry per party of a `SplitModule`, in the
            module's order. In a dict, the entry `rows` contains positions of the rows in a table,
            unless the model has an argument with this name.
        labels: labels of the rows.
    """
    (inputs, rows), core = apart(inputs), crossings_of(model)
    if isinstance(core, CutModel):
        args, named = arguments_of(inputs)
        return model(*args, labels=labels, rows=rows, **named)
    return model(by_party(core, inputs), labels, rows)


def apart(inputs: Any) -> tuple[Any, Any]:
    """Return a batch's inputs without their entry `rows`, and this entry or None."""
    if not isinstance(inputs, Mapping) or "rows" not in inputs:
        return inputs, None
    return {name: one for name, one in inputs.items() if name != "rows"}, inputs["rows"]


def by_party(model: Crossings, inputs: Any) -> Any:
    """Return a `SplitModule`'s inputs by party; a tuple has one entry per party, in order."""
    parties = list(model.experiment.parties)
    if isinstance(inputs, tuple) and len(inputs) == len(parties):
        return dict(zip(parties, inputs, strict=True))
    return {parties[0]: inputs} if isinstance(inputs, Tensor) and len(parties) == 1 else inputs


def columns_of(
    model: Crossings, party: str, inputs: Any
) -> tuple[dict[str | int, Tensor], dict[str, Tensor], bool]:
    """Return one party's tensors of a batch by argument, and the other parties' tensors.

    Args:
        model: the module.
        party: the feature party.
        inputs: inputs of the split module.

    Returns:
        The party's tensors with one row per input row; the arguments of `forward` that belong to
        other parties, if this party can only run the whole model; and whether the party also gets
        inputs without a row axis, such as a graph's edges.
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
    if not tensors:  # the party that computes the middle of a U-shape has no columns
        return {}, {}, True
    rows = len(next(iter(tensors.values())))
    by_row = {name: one for name, one in tensors.items() if len(one) == rows and not one.is_sparse}
    rest = {name: one for name, one in others.items() if isinstance(one, Tensor)}
    shared = len(by_row) < len(own) or any(len(one) != rows for one in rest.values())
    return by_row, rest, shared or len(rest) < len(others)


def row_digests(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Yield a 63-bit digest of each row of several tensors, from only the row's bytes."""
    joined = np.concatenate([_bytes_of(one) for one in tensors], 1)
    for row in joined:
        yield int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "big") >> 1


def _bytes_of(values: Tensor) -> np.ndarray:
    """Return the bytes of each row of a tensor, axes (rows, bytes)."""
    dense = values.to_dense() if values.layout is not torch.strided else values
    flat = dense.detach().cpu().reshape(len(dense), -1).contiguous()
    return flat.view(torch.uint8).numpy()


def loss_of(outputs: Any, labels: Tensor, task: str) -> Tensor:
    """Return the model's own loss, or else the cross-entropy or the mean squared error.

    Args:
        outputs: logits with axes (rows, classes) or (rows, tokens, classes), or numbers with axes
            (rows,) or (rows, 1). Alternatively an object or dict with `logits` and its own `loss`,
            like the outputs of Hugging Face models.
        labels: labels with the axes of the outputs except the last axis; labels are 0 or 1 if the
            outputs have a single logit per row.
        task: "classification" or "regression".

    Raises:
        DataError: the outputs have no logits, or their axes do not fit the labels.
    """
    own = entry_of(outputs, "loss")
    if own is not None:
        return own
    logits = logits_in(outputs)
    if task == "regression":
        return mse_loss(_like(logits, labels).float(), labels.float())
    if logits.numel() == labels.numel() and (logits.dim() == 1 or logits.shape[-1] == 1):
        return binary_cross_entropy_with_logits(_like(logits, labels), labels.to(logits))
    return cross_entropy(_by_label(logits, labels), labels.flatten())


def logits_in(outputs: Any) -> Tensor:
    """Return a model's logits: its output, or the output's entry or attribute `logits`.

    Raises:
        DataError: the output has no logits.
    """
    found = entry_of(outputs, "logits") if not isinstance(outputs, Tensor) else outputs
    if found is None:
        raise DataError(
            "the output of the model contains no logits",
            where="the model's output",
            got=f"a {type(outputs).__name__}",
            want="a tensor, or a dict or an object with 'logits'",
            fix="return the logits alone, or name them",
        )
    return found


def judged(logits: Tensor, labels: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Return outputs, axes (labels, outputs), and labels, axes (labels,), for quality metrics.

    Args:
        logits: outputs for rows or tokens; a single output per label is the logit of class 1
            relative to 0.
        labels: labels of rows, of tokens, or of classes.
        task: "classification" or "regression".

    Raises:
        DataError: the axes of the outputs do not fit the labels.
    """
    if task == "regression":
        return _like(logits, labels).reshape(-1, 1).float(), labels.flatten().float()
    if logits.numel() == labels.numel():
        one = logits.reshape(-1, 1).float()
        return torch.cat([torch.zeros_like(one), one], 1), labels.flatten().long()
    return _by_label(logits, labels).float(), labels.flatten().long()


def _like(logits: Tensor, labels: Tensor) -> Tensor:
    """Return outputs, reshaped to the axes of the labels."""
    if logits.numel() != labels.numel():
        raise _other_axes(logits, labels, f"axes {tuple(labels.shape)}")
    return logits.reshape(labels.shape)


def _by_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Return outputs with axes (labels, outputs), with one output per class for each label."""
    axes = labels.shape[:-1] if labels.dim() == logits.dim() > 1 else labels.shape
    if logits.shape[:-1] != axes and logits.shape[:1] + logits.shape[2:] == axes:
        # the class axis of the outputs is the second one, as in torch's cross-entropy
        logits = logits.movedim(1, -1)
    if logits.shape[:-1] != axes or labels.is_floating_point() or axes.numel() != labels.numel():
        raise _other_axes(logits, labels, "labels int64 of axes (rows,), outputs (rows, classes)")
    return logits.flatten(0, -2)


def _other_axes(logits: Tensor, labels: Tensor, want: str) -> DataError:
    named = str(labels.dtype).removeprefix("torch.")
    return DataError(
        "outputs and labels do not fit together",
        got=f"outputs of axes {tuple(logits.shape)}, labels of axes {tuple(labels.shape)}, {named}",
        want=want,
        fix="labels.long() where they are classes, task='regression' where they are numbers, or "
        "a loss of your own",
    )


#: Names of the settings of [train] that the training of a module has; other settings concern
#: parties and sessions.
RECIPE = (
    "epochs", "optimizer", "schedule", "warmup_steps", "clip_norm", "learning_rate", "momentum",
    "weight_decay", "precision", "patience", "keep", "measure",
)  # fmt: skip
Loss = Callable[[Any, Tensor], Tensor]


def recipe_of(settings: Mapping[str, Any], validated: bool = False) -> TrainSettings:
    """Return the [train] settings for the training of a module, from keyword arguments.

    Args:
        settings: by name.
        validated: whether the training has validation rows.

    Raises:
        ConfigError: the training of a module has no such setting, a value is invalid, or a setting
            needs validation rows.
    """
    for name in settings:
        if name not in RECIPE:
            raise ConfigError(
                "a module's training does not have this setting",
                where=name,
                want=", ".join(RECIPE),
                fix=nearest(name, RECIPE),
            )
    found = check(settings, TrainSettings, where="the training of a module")
    _ = Optimization(found).copies  # a test optimiser raises an error if a value is invalid
    if judges(found) and not validated:
        raise ConfigError(
            "patience and keep = 'best' need validation rows",
            fix="give vfl.fit a loader of them: vfl.fit(model, loader, validation, ...); in a "
            "grid or a comparison within a function of yours: fit=function",
        )
    return found


def judges(train: TrainSettings) -> bool:
    """Return whether a training selects its best epoch by metrics of validation rows."""
    return train.patience > 0 or train.keep == "best"


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    validation: Iterable[Any] | None = None,
    *,
    loss: str | Loss | None = None,
    on_epoch: Callable[[dict[str, float]], None] = lambda record: None,
    **settings: Any,
) -> list[dict[str, float]]:
    """Train a module with given settings; the loss includes the codec's and the defense's terms.

    Args:
        model: a `SplitModule` or the result of `vfl.split`, which may be compiled by
            `torch.compile`.
        loader: data loader with batches of the training rows; every epoch iterates over it once.
        validation: batches of validation rows, which are evaluated at the end of each epoch.
        loss: spec of a loss, such as "cross_entropy:smoothing=0.1", or a function of outputs and
            labels. None selects the model's own loss, cross-entropy, or the mean squared error.
        on_epoch: callback that receives the record of each epoch.
        settings: [train] settings as in an experiment file: epochs, optimizer, schedule,
            warmup_steps, clip_norm (for each party's own weights), learning_rate, momentum,
            weight_decay, precision; with `validation` also patience, keep and measure.

    Returns:
        One record per epoch, with `epoch`, `seconds`, `train_loss` if it is finite, metrics of
        validation rows, and the bytes sent so far in both directions. The record has `best_epoch`
        if validation rows select this epoch.

    Raises:
        ConfigError: the training of a module has no such setting, or the setting needs
            `validation`.
        SpecError: the spec of a loss, an optimiser or a schedule is wrong.
        DataError: a batch has no labels, or the loader is empty.

    >>> from vfl.training.cutting import split
    >>> rows = torch.eye(4)
    >>> model = split(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "0", rows)
    >>> batches = [(rows, torch.tensor([0, 1, 0, 1]))]
    >>> history = fit(model, batches, epochs=2, optimizer="adamw", warmup_steps=2)
    >>> model.step, len(history)
    (2, 2)
    """
    core = crossings_of(model, averaged=False)
    train = recipe_of(settings, validated=validation is not None)
    is_judged = judges(train)
    task_loss, steps, trained = _loss_in_words(loss, core.task), Optimization(train), 0
    optimizer, parts = steps.build(core.parameters()), _weights_of_parties(core)
    stopping = EarlyStopping(train, lambda: _weights(core), lambda best: _put(core, best))
    history: list[dict[str, float]] = []
    for epoch in range(1, train.epochs + 1):
        began, losses, rows = time.perf_counter(), 0.0, 0
        model.train()
        for inputs, labels in _moved(loader, model):
            steps.begin(epoch, trained)
            with _autocast(model, train.precision):
                outputs = answered(model, inputs, labels)
            value = task_loss(outputs, labels)
            optimizer.zero_grad()
            whole = value + core.extra_loss()
            whole.backward()  # type: ignore[no-untyped-call]
            for own in parts if train.clip_norm else ():
                nn.utils.clip_grad_norm_(own, train.clip_norm)
            optimizer.step()
            losses, rows = losses + float(value.detach()) * len(labels), rows + len(labels)
            trained += 1
        if not rows:
            raise DataError("the loader returns no batch", where="the loader", got=f"epoch {epoch}")
        record: dict[str, float] = {"epoch": epoch}
        if math.isfinite(mean := losses / rows):
            record["train_loss"] = mean
        if validation is not None:
            record |= validated(model, validation, task_loss, train.precision)
        if is_judged:
            asked = Exchange(trained, "validation", epoch, np.empty(0, np.int64), last=True)
            stopping.judge(record, asked)
            record["best_epoch"] = stopping.best_epoch
        record["seconds"] = round(time.perf_counter() - began, 3)
        record |= {way: core.ledger.total_bytes(way.removeprefix("bytes_")) for way in _WAYS}
        history.append(record)
        on_epoch(record)
        if stopping.stopped:
            break
    return history


@torch.no_grad()
def validated(
    model: nn.Module, rows: Iterable[Any], loss: Loss, precision: str = "float32"
) -> dict[str, float]:
    """Return loss and metrics of validation rows; names begin with `validation_`.

    Raises:
        DataError: there is no batch, a batch has no labels, or outputs do not fit the labels.
    """
    model.eval()
    task, losses, answers, truths = crossings_of(model).task, 0.0, [], []
    for inputs, labels in _moved(rows, model):
        with _autocast(model, precision):
            outputs = answered(model, inputs)
        losses += float(loss(outputs, labels)) * len(labels)
        answer, truth = judged(logits_in(outputs), labels, task)
        answers.append(answer.cpu())
        truths.append(truth.cpu())
    if not truths:
        raise DataError("the loader returns no batch", where="the validation rows")
    count = sum(map(len, truths))
    quality = regression_quality if task == "regression" else classification_quality
    found = {"loss": losses / count} | quality(torch.cat(answers), torch.cat(truths))
    return {f"validation_{name}": value for name, value in found.items()}


def _loss_in_words(loss: str | Loss | None, task: str) -> Loss:
    if loss is None:
        return lambda outputs, labels: loss_of(outputs, labels, task)
    if not isinstance(loss, str):
        return loss
    made = make_loss(loss, task)

    def of(outputs: Any, labels: Tensor) -> Tensor:
        logits, truth = judged(logits_in(outputs), labels, task)
        return made(logits[:, 0] if task == "regression" else logits, truth)

    return of


def _moved(loader: Iterable[Any], model: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    device = device_of(model)
    for batch in loader:
        inputs, labels = moved(labelled(batch), device)
        yield inputs, labels


def _autocast(model: nn.Module, precision: str) -> AbstractContextManager[Any]:
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device_of(model).type, torch.bfloat16)


def _weights_of_parties(model: Crossings) -> list[list[nn.Parameter]]:
    """Return each party's weights, to clip them separately; the label party gets all others."""
    if isinstance(model, CutModel):
        owners = {f"model.{one}": party for party, own in model.parts.items() for one in own}
        parties = [*model.parts]
    else:
        assert isinstance(model, SplitModule), "a split module is a SplitModule or a CutModel"
        parties, owners = [*model.bottoms, ""], {}
    found: dict[str, list[nn.Parameter]] = {party: [] for party in parties}
    for name, weight in model.named_parameters():
        part, _, rest = name.partition(".")
        owner = rest.partition(".")[0] if part in ("bottoms", "encoders") else owners.get(name)
        owner = parties[0] if part == "restorer" else owner
        found[owner if owner in found else parties[-1]].append(weight)
    return list(found.values())


def _weights(model: Crossings) -> dict[str, Tensor]:
    """Return a module's weights and buffers, without its step and random state."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _put(model: Crossings, best: Mapping[str, Tensor]) -> None:
    for name, value in _weights(model).items():
        value.copy_(best[name])


_WAYS = ("bytes_up", "bytes_down")
