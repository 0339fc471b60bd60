"""What defenses refuse: labels they mean nothing for, company and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from vfl.defenses.base import Defense, LabelKind
from vfl.defenses.chain import uses
from vfl.errors import SpecError

_LOOKS = "looks at labels in '{}'"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def require_classes(defense: str, kind: LabelKind) -> int:
    """The number of classes.

    Raises:
        SpecError: the labels are numbers.
    """
    if kind.classes is None:
        raise SpecError(
            f"'{defense}' is about classes, and the labels of a regression are numbers",
            want="label.task = 'classification'",
            fix="another defense; of labels that are numbers none of vfl's hides anything exactly",
        )
    return kind.classes


def require_two_classes(defense: str, kind: LabelKind) -> None:
    """Refuse labels that are not of two classes.

    Raises:
        SpecError: with the number there are.
    """
    classes = require_classes(defense, kind)
    if classes != 2:
        raise SpecError(
            f"'{defense}' hides which of two classes a row has",
            got=f"{classes} classes",
            want="2 classes",
            fix="gradient_noise, tpsl or label_dp work for any number of classes",
        )


def require_equal_weights(defense: str, kind: LabelKind) -> None:
    """Refuse rows or classes of different weights.

    Raises:
        SpecError: a label's gradient then depends on other labels.
    """
    if kind.weighted:
        raise SpecError(
            f"'{defense}' needs every row to weigh the same in the loss",
            got="weights of rows or classes",
            want="label.class_weight = 'none', and no weights of rows",
        )


def refuse_label_readers(
    defense: str, before: Sequence[Defense], after: Sequence[Defense], cure: str
) -> None:
    """Refuse members through which a row's gradient depends on labels that no noise covers.

    Raises:
        SpecError: with the member that is in the way.
    """
    for member, hook in _label_readers((*before, *after)):
        _refuse(f"the epsilon of '{defense}' does not hold", member, _LOOKS.format(hook), cure)


def refuse_early_readers(defense: str, members: Sequence[Defense], cure: str) -> None:
    """Refuse members that look at labels some of which are not told yet.

    Raises:
        SpecError: with the member that is in the way.
    """
    for member, hook in _label_readers(members, "labels"):
        does = f"{_LOOKS.format(hook)} while some are not told"
        _refuse(f"'{defense}' does not go", member, does, cure)


def refuse_mixing(defense: str, members: Sequence[Defense], hook: str, cure: str) -> None:
    """Refuse members that may make one row out of several before the noise comes.

    Raises:
        SpecError: with the member that is in the way.
    """
    for member in members:
        if uses(member, hook) and not member.rows_apart:
            does = f"may mix rows in '{hook}'"
            _refuse(f"the epsilon of '{defense}' does not hold", member, does, cure)


def refuse_batch_norm(module: nn.Module, defense: str) -> None:
    """Refuse a model in which one row's output depends on the others.

    Raises:
        SpecError: clipping rows bounds nothing then.
    """
    if any(isinstance(part, _BATCH_NORMS) for part in module.modules()):
        raise SpecError(
            f"'{defense}' promises an epsilon for one row, and the model normalises over the batch",
            want="a model that treats each row on its own",
            fix=f"another model, or {defense}:norm=inf, which promises nothing",
        )


def _label_readers(members: Sequence[Defense], *more: str) -> Iterator[tuple[Defense, str]]:
    """Members with hooks that look at labels at the label party, and one such hook of each."""
    for member in members:
        if member.side == "feature" or member.label_free:
            continue
        if found := uses(member, *more, "loss", "targets", "batch", "gradient"):
            yield member, found[0]


def _refuse(what: str, member: Defense, does: str, cure: str) -> None:
    raise SpecError(f"{what} beside {type(member).__name__}, which {does}", fix=cure)
