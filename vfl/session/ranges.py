"""Numbers in a session's terms, and the range in which a party accepts each of them.

Another party chooses the terms, so every number in them has a range: the range in the schema of the
terms, or a narrower range in `USUAL`. `[consent.ranges]` of the party's own configuration file may
set another range. Each number in the options of a plug-in, such as ``clipped_noise:norm=4``, has
the range that the plug-in's constructor accepts; the party's file may name the option and set a
narrower range.
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

#: Accepted ranges that are narrower than those of the schema; the party's own configuration file
#: may set other ranges.
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
#: Accepted ranges of numbers that are computed from several settings, because each of these
#: settings may be within its own range. The number here is the share of every weight that weight
#: decay removes in the steps of one exchange. A large share would erase a bottom after a few steps.
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
#: Numbers that have a separate setting in [consent] instead of a range, because that setting counts
#: other numbers too.
NAMED: Mapping[str, str] = {
    "train.epochs": "max_epochs",
    "train.batch_size": "max_batch_size",
    "parties.width": "max_width",
}
#: Prefixes of settings that only a training uses; in an alignment these settings have their
#: defaults.
_OF_TRAINING = ("train.", "dp.")
#: Families of plug-ins whose options occur in terms; the keys are the first part of a range's name.
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
    """Return the share by which weight decay shrinks a weight, per unit of learning rate.

    The optimiser "asgd" has a separate option for this share.
    """
    return max(train.weight_decay, abs(OPTIMIZERS.numbers(train.optimizer).get("asgd.lambd", 0)))


class _Steps(NamedTuple):
    """Learning rate and momentum in one epoch."""

    rate: float
    momentum: float


def _steps(terms: Terms) -> set[_Steps]:
    """Return the learning rates and momenta of all epochs."""
    train = terms.train
    how, epochs = Optimization(train), 1 if train.schedule == NO_SCHEDULE else train.epochs
    return {_Steps(how.rate(epoch), how.momentum(epoch)) for epoch in range(1, epochs + 1)}


@cache
def schema_ranges(model: type[Settings], prefix: str = "") -> dict[str, Range]:
    """Return the ranges of a schema's numbers, as bounds by dotted name of the number.

    Names of parties are left out: ``parties.width`` is the width of each party.

    Raises:
        TypeError: a number has no lower or no upper bound.
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
            raise TypeError(f"{name} is a number, and its schema does not bound it on both sides")
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
    """Return the schemas of the products' requests, by the prefix of the names of their numbers."""
    paths = [each for product in products().values() for each in product.terms.items()]
    return {prefix: named(path) for prefix, path in paths}


@cache
def limiting_settings() -> dict[str, str]:
    """Map each number that a separate setting of [consent] limits to that setting."""
    added = {
        f"{prefix}.{name}": setting
        for prefix, schema in schemas_of_products().items()
        for name, setting in schema.limited_by.items()
    }
    return {**NAMED, **added}


@cache
def default_ranges() -> dict[str, Range]:
    """Return the range of every number in the terms that holds if a party's file sets none."""
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
    """Return the range of every number in the terms, and of every plug-in option in a party's file.

    Raises:
        ConfigError: the file sets a range for a name that is no number of the terms.
    """
    known = default_ranges()
    for name in consent.ranges:
        if name in limiting_settings():
            raise _no_range(name, f"'{limiting_settings()[name]}' of [consent], which bounds it")
        if name not in known and name not in (options := _options(name)):
            raise _no_range(name, nearest(name, [*known, *options]))
    return known | consent.ranges


def out_of_range(terms: Terms, consent: Consent) -> Iterator[tuple[str, str]]:
    """Yield each number in a session's terms that a party does not accept, and the accepted range.

    Raises:
        ConfigError: see `ranges_of`.
        SpecError: a plug-in does not exist, or does not have an option.
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
    """Yield each number in a product's request that a party does not accept, and its range.

    Args:
        settings: settings of a schema that `terms` of the product lists.
        prefix: name of the schema, which is the prefix of the names of its ranges.
        consent: consent in the party's own configuration file.
        specs: for each family of plug-ins, the specs that the settings name.

    Raises:
        ConfigError: see `ranges_of`.
        SpecError: see `out_of_range`.
    """
    yield from _beyond([*numbers_of(settings, prefix), *_options_in(specs, consent)], consent)


def numbers_of(content: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in some settings, by the names that `schema_ranges` uses."""
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
    """Yield those numeric options of plug-ins for which a party's file sets a range."""
    for family in sorted({name.partition(".")[0] for name in consent.ranges} & specs.keys()):
        for spec in specs[family]:
            for name, value in FAMILIES[family].numbers(spec).items():
                if f"{family}.{name}" in consent.ranges:
                    yield f"{family}.{name}", value


def _options(name: str) -> list[str]:
    """Return the numeric options of the plug-in whose name begins the given range's name."""
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
        "no number of a session's terms is called that",
        where="consent.ranges",
        got=name,
        want="such as train.learning_rate or defense.clipped_noise.norm",
        fix=fix,
    )
