"""The numbers in a session's terms, and the range of values that a party accepts for each number.

Another party chooses the terms, so every number in them has a range of accepted values: the range
in the schema of the terms, or a narrower range in `USUAL`. `[consent.ranges]` in the party's own
configuration file may set another range for a number. A number in the options of a plug-in, such as
``clipped_noise:norm=4``, has the range that the plug-in's constructor accepts; the party's file may
set a narrower range under the option's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from vfl.compression import CODECS
from vfl.config import Consent, TrainSettings
from vfl.config.toml import Settings
from vfl.core.errors import ConfigError, SpecError, nearest
from vfl.core.products import products
from vfl.core.registry import Registry, named, parts
from vfl.datasets.alignment.protocols import PROTOCOLS
from vfl.defenses import DEFENSES
from vfl.models import BOTTOMS, MERGERS, TOPS
from vfl.models.optimizers import NO_SCHEDULE, OPTIMIZERS, SCHEDULES, Optimization
from vfl.session.secure_mode import SECURE
from vfl.session.terms import AlignTerms, Terms

Range = tuple[float, float]

#: Accepted ranges that are narrower than the ranges of the schema; the party's own configuration
#: file may set other ranges.
USUAL: Mapping[str, Range] = {
    "train.learning_rate": (0, 10),
    "train.momentum": (0, 0.999),
    "train.weight_decay": (0, 0.1),
    "tasks.weight": (1e-6, 1000),
    "dp.noise": (1e-3, 1e6),
    "dp.epsilon": (1e-3, 1e4),
    "dp.delta": (1e-12, 0.01),
    "dp.clip": (1e-4, 1e4),
    "dp.clips": (1e-4, 1e4),
}
#: Accepted ranges of quantities that are computed from several settings: each setting may be within
#: its own range although the quantity is too large. The only quantity here is the fraction of every
#: weight that weight decay removes in the steps of one exchange. If this fraction were large,
#: weight decay would erase a bottom model after a few steps.
DERIVED: Mapping[str, tuple[Range, Callable[[Terms], float]]] = {
    "train.decay_of_a_step": (
        (0, 0.01),
        lambda terms: (
            max(steps.rate for steps in _steps(terms))
            * _decay(terms.train)
            * terms.train.local_steps
        ),
    ),
}
#: Numbers that a separate setting of [consent] limits, instead of a range; that setting also counts
#: other numbers.
NAMED: Mapping[str, str] = {
    "train.epochs": "max_epochs",
    "train.batch_size": "max_batch_size",
    "parties.width": "max_width",
}
#: Prefixes of settings that only a training uses; in the terms of an alignment, these settings have
#: their defaults.
_OF_TRAINING = ("train.", "dp.")
#: Families of plug-ins whose options occur in terms; each key is the first part of the names of the
#: options' ranges.
FAMILIES: Mapping[str, Registry[Any]] = {
    "codec": CODECS,
    "defense": DEFENSES,
    "secure": SECURE,
    "merger": MERGERS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "bottom": BOTTOMS,
    "top": TOPS,
    "alignment": PROTOCOLS,
}


def _decay(train: TrainSettings) -> float:
    """Return the fraction of a weight that weight decay removes per unit of learning rate.

    For the optimiser "asgd", a separate option sets this fraction.
    """
    return max(train.weight_decay, abs(OPTIMIZERS.numbers(train.optimizer).get("asgd.lambd", 0)))


class _Steps(NamedTuple):
    """Learning rate and momentum of the optimiser in one epoch."""

    rate: float
    momentum: float


def _steps(terms: Terms) -> set[_Steps]:
    """Return all pairs of learning rate and momentum that occur in the training's epochs."""
    train = terms.train
    how, epochs = Optimization(train), 1 if train.schedule == NO_SCHEDULE else train.epochs
    return {_Steps(how.rate(epoch), how.momentum(epoch)) for epoch in range(1, epochs + 1)}


@cache
def schema_ranges(model: type[Settings], prefix: str = "") -> dict[str, Range]:
    """Return the range of each number in a schema, by the number's dotted name.

    The names omit the names of parties: ``parties.width`` stands for the width of each party.

    Raises:
        TypeError: the schema gives a number no lower bound or no upper bound.
    """
    schema = model.model_json_schema()
    return dict(_bounds(schema, schema.get("$defs", {}), prefix))


def _bounds(
    node: Mapping[str, Any], models: Mapping[str, Any], name: str
) -> Iterator[tuple[str, Range]]:
    if "$ref" in node:
        node = models[node["$ref"].rpartition("/")[2]]
    if node.get("type") in ("integer", "number"):
        least = node.get("minimum", node.get("exclusiveMinimum"))
        most = node.get("maximum", node.get("exclusiveMaximum"))
        if least is None or most is None:
            raise TypeError(
                f"{name} is a number, but its schema does not set both a lower and an upper bound"
            )
        yield name, (least, most)
    for inside, content in node.get("properties", {}).items():
        yield from _bounds(content, models, f"{name}.{inside}" if name else inside)
    unnamed = [*node.get("anyOf", ()), *node.get("prefixItems", ())]
    unnamed += node.get("patternProperties", {}).values()
    unnamed += [node[key] for key in ("items", "additionalProperties") if node.get(key)]
    for content in unnamed:
        yield from _bounds(content, models, name)


@cache
def schemas_of_products() -> dict[str, type[Settings]]:
    """Return the schemas of the products' requests, by the prefix of their numbers' names."""
    paths = [each for product in products().values() for each in product.terms.items()]
    return {prefix: named(path) for prefix, path in paths}


@cache
def limiting_settings() -> dict[str, str]:
    """Return the setting of [consent] that limits a number, by the number's name."""
    added = {
        f"{prefix}.{name}": setting
        for prefix, schema in schemas_of_products().items()
        for name, setting in schema.limited_by.items()
    }
    return {**NAMED, **added}


@cache
def default_ranges() -> dict[str, Range]:
    """Return the range of every number in the terms, for a party whose file sets no range."""
    found, usual = schema_ranges(Terms) | schema_ranges(AlignTerms), dict(USUAL)
    for prefix, schema in schemas_of_products().items():
        found |= schema_ranges(schema, prefix)
        usual |= {f"{prefix}.{name}": ends for name, ends in schema.usual_ranges.items()}
    found |= {name: ends for name, (ends, _) in DERIVED.items()}
    return {
        name: usual.get(name, found[name])
        for name in sorted(found.keys() - limiting_settings().keys())
    }


def ranges_of(consent: Consent) -> dict[str, Range]:
    """Return the accepted range of every number in the terms, and of options in a party's file.

    Raises:
        ConfigError: the party's file sets a range for a name that no number of the terms has.
    """
    known = default_ranges()
    for name in consent.ranges:
        if name in limiting_settings():
            raise _no_range(
                name, f"'{limiting_settings()[name]}' of [consent], which limits this number"
            )
        if name not in known and name not in (options := _options(name)):
            raise _no_range(name, nearest(name, [*known, *options]))
    return known | consent.ranges


def out_of_range(terms: Terms, consent: Consent) -> Iterator[tuple[str, str]]:
    """Yield each number in a session's terms that is outside the party's range, and this range.

    Raises:
        ConfigError: see `ranges_of`.
        SpecError: the terms name a plug-in that does not exist, or an option that the plug-in does
            not have.
    """
    skipped = _OF_TRAINING if terms.mode == "align" else ()
    named = [*numbers_of(terms), *((name, of(terms)) for name, (_, of) in DERIVED.items())]
    for steps in _steps(terms):
        named += [("train.learning_rate", steps.rate), ("train.momentum", steps.momentum)]
    found = [pair for pair in named if not pair[0].startswith(skipped)]
    yield from _beyond([*found, *_numbers_of_specs(terms, consent)], consent)


def out_of_products_range(
    settings: Settings, prefix: str, consent: Consent, specs: Mapping[str, Iterable[str]]
) -> Iterator[tuple[str, str]]:
    """Yield each number in a product's request that is outside the party's range, and this range.

    Args:
        settings: settings of the request, an object of a schema in the product's `terms`.
        prefix: name of the schema, which is the prefix of its ranges' names.
        consent: the [consent] table of the party's own configuration file.
        specs: for each family of plug-ins, the specs that the request names.

    Raises:
        ConfigError: see `ranges_of`.
        SpecError: see `out_of_range`.
    """
    yield from _beyond([*numbers_of(settings, prefix), *_options_in(specs, consent)], consent)


def numbers_of(content: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in some settings, under the names that `schema_ranges` uses."""
    if isinstance(content, Settings):
        for inside in type(content).model_fields:
            yield from numbers_of(getattr(content, inside), f"{name}.{inside}" if name else inside)
    elif isinstance(content, Mapping | tuple | list):
        for one in content.values() if isinstance(content, Mapping) else content:
            yield from numbers_of(one, name)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, content


def _beyond(numbers: Iterable[tuple[str, float]], consent: Consent) -> Iterator[tuple[str, str]]:
    ranges = ranges_of(consent)
    for name, value in dict.fromkeys(numbers):
        if name not in limiting_settings():
            least, most = ranges[name]
            if not least <= value <= most:
                yield f"{name} {value}", f"{name} from {least:g} to {most:g}"


def _numbers_of_specs(terms: Terms, consent: Consent) -> Iterator[tuple[str, float]]:
    specs = {
        "codec": [terms.codec],
        "defense": parts(terms.defense),
        "merger": [terms.merge],
        "optimizer": [terms.train.optimizer],
        "schedule": [one for one in [terms.train.schedule] if one != NO_SCHEDULE],
        "secure": [terms.secure],
        "bottom": [party.bottom for party in terms.parties.values()],
        "top": [task.top for task in terms.tasks.values()],
    }
    if terms.middle is not None:
        specs["codec"].append(terms.middle.codec)
        specs["bottom"].append(terms.middle.model)
    if isinstance(terms, AlignTerms):
        specs["alignment"] = [terms.protocol]
    return _options_in(specs, consent)


def _options_in(
    specs: Mapping[str, Iterable[str]], consent: Consent
) -> Iterator[tuple[str, float]]:
    """Yield name and value of each plug-in option for which a party's file sets a range."""
    for family in sorted({name.partition(".")[0] for name in consent.ranges} & specs.keys()):
        for spec in specs[family]:
            for name, value in FAMILIES[family].numbers(spec).items():
                if f"{family}.{name}" in consent.ranges:
                    yield f"{family}.{name}", value


def _options(name: str) -> list[str]:
    """Return the names of all numeric options of the plug-in in a range's name."""
    family, _, rest = name.partition(".")
    member = rest.partition(".")[0]
    if family not in FAMILIES:
        return []
    try:
        return [f"{family}.{member}.{each}" for each in FAMILIES[family].numeric(member)]
    except SpecError:
        return []


def _no_range(name: str, fix: str | None) -> ConfigError:
    return ConfigError(
        "no number of a session's terms has this name",
        where="consent.ranges",
        got=name,
        want="a name such as train.learning_rate or defense.clipped_noise.norm",
        fix=fix,
    )
