"""The specs an experiment names, all checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from vfl import compression, defenses, models
from vfl.config import Experiment, LabelSettings, PartySettings, Places
from vfl.config.toml import mistakes
from vfl.errors import SpecError

Setting = tuple[str, ...]


def check_specs(experiment: Experiment, places: Places | None = None) -> None:
    """Build every plug-in the experiment names, so that a wrong spec is told before anything runs.

    Args:
        experiment: what to check.
        places: where its settings stand, for the messages.

    Raises:
        SpecError: with the nearest known name or option, or the widths that would fit.
        ConfigError: several specs are wrong; all of them are told.
    """
    places = places or Places()
    wrong = list(_wrong_specs(experiment.model_dump()))
    if len(wrong) > 1:
        raise mistakes([(setting, _line(setting, error)) for setting, error in wrong], places)
    for setting, error in wrong:
        here = f"{places.before(setting)}{'.'.join(setting)}"
        error.where = f"{here}, {error.where}" if error.where else here
        raise error


def spec_mistakes(content: Mapping[str, Any]) -> Iterator[tuple[Setting, str]]:
    """The wrong specs among settings that may be wrong themselves; see `vfl.config.read_toml`."""
    for setting, error in _wrong_specs(content):
        yield setting, _line(setting, error)


def _line(setting: Setting, error: SpecError) -> str:
    cure = error.fix or (error.want and f"want {error.want}")
    return f"{'.'.join(setting)}: {error.what}" + (f"; {cure}" if cure else "")


def _wrong_specs(content: Mapping[str, Any]) -> Iterator[tuple[Setting, SpecError]]:
    """Every wrong spec of some settings; whatever is no text is another check's business."""
    label, parties = _table(content, "label"), _table(content, "parties")
    label_party = label.get("party", LabelSettings().party)
    widths = [
        _table(parties, name).get("width", PartySettings().width)
        for name in parties
        if name != label_party
    ]
    checks: list[tuple[Setting, object, Callable[[str], object]]] = [
        (("codec",), content.get("codec"), partial(_check_codec, widths)),
        (("defense",), content.get("defense"), partial(_check_defense, label.get("task"))),
        (("label", "top"), label.get("top"), models.make_top),
    ]
    checks += [
        (("parties", name, "bottom"), _table(parties, name).get("bottom"), models.make_bottom)
        for name in parties
    ]
    for setting, spec, check in checks:
        if isinstance(spec, str):
            try:
                check(spec)
            except SpecError as error:
                yield setting, error


def _check_codec(widths: Sequence[object], spec: str) -> None:
    codec = compression.make(spec)
    for width in widths:
        if isinstance(width, int) and width > 0:
            codec.check(width)


def _check_defense(task: object, spec: str) -> None:
    defense = defenses.make(spec)
    if task == "regression":  # how many classes there are is known when the labels are read
        defense.prepare(defenses.LabelKind(classes=None))


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}
