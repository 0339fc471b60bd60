"""The specs an experiment names, all checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vfl import compression, defenses, models
from vfl.config import (
    WANTED,
    DataSettings,
    Experiment,
    LabelSettings,
    Locations,
    MiddleSettings,
    PartySettings,
    TrainSettings,
    read_experiment,
)
from vfl.config.grid import PACKS
from vfl.config.toml import check as check_settings
from vfl.config.toml import mistakes
from vfl.core.errors import (
    BadOptionError,
    ExposedCutError,
    SpecError,
    UnknownNameError,
    UnknownOptionError,
    UserError,
)
from vfl.models.mlp import MLPBottom
from vfl.session.trace import trace_of_masked_cuts

Setting = tuple[str, ...]


def read_checked(path: Path, overrides: Sequence[str] = ()) -> tuple[Experiment, Locations]:
    """An experiment file whose settings and specs are all right, and where each setting stands.

    Raises:
        ConfigError, SpecError: everything that is wrong with it.
    """
    experiment = read_experiment(path, overrides, spec_mistakes)
    locations = Locations.of(path, overrides)
    check_specs(experiment, locations)
    return experiment, locations


def checked(content: Mapping[str, Any], where: str) -> Experiment:
    """The experiment of arguments in Python, held to all that a file is held to.

    Args:
        content: the settings.
        where: what messages call the arguments.

    Raises:
        ConfigError, SpecError: as `read_checked`.
    """
    experiment = check_settings(content, Experiment, where, spec_mistakes)
    check_specs(experiment, Locations(where))
    return experiment


def check_specs(experiment: Experiment, locations: Locations | None = None) -> None:
    """Build every plug-in the experiment names, so that a wrong spec is told before anything runs.

    Args:
        experiment: what to check.
        locations: where its settings stand, for the messages.

    Raises:
        SpecError: with the nearest known name or option, or the widths that would fit.
        ConfigError: several specs are wrong; all of them are told.
    """
    raise_mistakes(list(_wrong_specs(experiment.model_dump())), locations or Locations())


def check_codecs(specs: Sequence[str], width: int, setting: str) -> None:
    """Build every codec for a cut of one width, so that all wrong specs are told at once.

    Args:
        specs: the codecs.
        width: of the cut.
        setting: what names them, for the messages.

    Raises:
        SpecError, ConfigError: see `check_specs`.
    """
    wrong = []
    for spec in specs:
        try:
            _check_codec([width], spec)
        except SpecError as error:
            wrong.append(((f"{setting} {spec}",), error))
    raise_mistakes(wrong, Locations())


def raise_mistakes(wrong: Sequence[tuple[Setting, UserError]], locations: Locations) -> None:
    """Raise what is wrong if anything is: a single mistake as it is, several as one error.

    Args:
        wrong: each setting's parts, and its mistake.
        locations: where the settings stand.
    """
    if len(wrong) > 1:
        raise mistakes([(setting, _line(setting, error)) for setting, error in wrong], locations)
    for setting, error in wrong:
        name = ".".join(setting)
        here = f"{locations.before(setting)}{name}"
        error.where = f"{here}, {error.where}" if error.where not in (None, name) else here
        raise error


def spec_mistakes(content: Mapping[str, Any]) -> Iterator[tuple[Setting, str]]:
    """The wrong specs among settings that may be wrong themselves; see `vfl.config.read_toml`."""
    for setting, error in _wrong_specs(content):
        yield setting, _line(setting, error)


def _line(setting: Setting, error: UserError) -> str:
    cure = error.fix or (error.want and f"want {error.want}")
    return f"{'.'.join(setting)}: {error.what}" + (f"; {cure}" if cure else "")


def _wrong_specs(content: Mapping[str, Any]) -> Iterator[tuple[Setting, SpecError]]:
    """Every wrong spec of some settings; whatever is no text is another check's business."""
    label, parties = _table(content, "label"), _table(content, "parties")
    label_defaults = LabelSettings()
    label_party = label.get("party", label_defaults.party)
    widths = [
        _table(parties, name).get("width", PartySettings().width)
        for name in parties
        if name != label_party
    ]
    secured = partial(_check_secure, content)
    defended = partial(_check_defense, label.get("task"))
    checks: list[tuple[Setting, object, Callable[[str], object]]] = [
        (("codec",), content.get("codec"), partial(_check_codec, widths)),
        (("defense",), content.get("defense"), defended),
        (("secure",), content.get("secure"), secured),
        (("label", "top"), label.get("top"), models.make_top),
    ]
    if middle := _table(content, "middle"):
        width = middle.get("width", MiddleSettings().width)
        checks += [
            (("middle", "model"), middle.get("model"), models.make_bottom),
            (("middle", "codec"), middle.get("codec"), partial(_check_codec, [width])),
            (("defense",), content.get("defense"), _check_known_beside_middle),
        ]
    tasks = content.get("tasks") or ()
    for task in (one for one in tasks if isinstance(one, Mapping)):
        kind = task.get("task", label_defaults.task)
        checks.append((("tasks", "top"), task.get("top"), models.make_top))
        checks.append((("defense",), content.get("defense"), partial(_check_defense, kind)))
    checks += [
        (("parties", name, "bottom"), _table(parties, name).get("bottom"), models.make_bottom)
        for name in parties
    ]
    lists: list[tuple[Setting, Callable[[str], object]]] = [
        (("compare", "codecs"), partial(_check_wanted, widths)),
        (("grid", "defenses"), partial(_check_listed, defended)),
        (("grid", "codecs"), partial(_check_listed, partial(_check_codec, widths))),
        (("grid", "adversaries"), partial(_check_listed, _check_adversary)),
        (("grid", "attacks"), partial(_check_listed, _check_attack)),
        (("value", "defenses"), partial(_check_listed, defended)),
        (("value", "codecs"), partial(_check_listed, partial(_check_codec, widths))),
    ]
    checks += [
        (setting, spec, check) for setting, check in lists for spec in _list(content, *setting)
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


def _check_wanted(widths: Sequence[object], spec: str) -> None:
    """A codec of a comparison; 1 stands in for a number that is looked for later."""
    _check_listed(lambda wanted: _check_codec(widths, wanted.replace(WANTED, "1")), spec)


def _check_secure(content: Mapping[str, Any], spec: str) -> None:
    """A secure mode beside the settings it was chosen with; none is beside anything."""
    if spec == "none":
        return
    from vfl.session import secure
    from vfl.session.secure import shares_weights

    parties, names = _table(content, "parties"), ("secure", "codec", "defense", "merge")
    named: dict[str, Any] = {name: str(content[name]) for name in names if name in content}
    # Of whatever was read: the rest of the experiment may be wrong, and is told elsewhere.
    chosen = Experiment.model_construct(
        **named,
        label=LabelSettings.model_construct(**_table(content, "label")),
        train=TrainSettings.model_construct(**_table(content, "train")),
        data=DataSettings.model_construct(**_table(content, "data")),
        parties={name: PartySettings.model_construct(**_table(parties, name)) for name in parties},
    )
    mode = secure.make(spec)
    if mode.ring(max(1, len(chosen.feature_parties))) is None and not mode.whole_network:
        return
    try:
        mode.refuse(chosen)
        if shares_weights(chosen) and not mode.whole_network:
            for name in chosen.feature_parties:
                _check_linear(name, str(chosen.parties[name].bottom))
    except ExposedCutError:
        raise
    except SpecError:
        return  # of codec, defense or bottom, which is told where it stands
    trace = _table(content, "trace")
    if trace.get("phases") or trace.get("snapshots"):
        raise trace_of_masked_cuts()


def _check_linear(party: str, bottom: str) -> None:
    """A bottom that a feature party shares with another."""
    recipe = models.make_bottom(bottom)
    if not isinstance(recipe, MLPBottom) or recipe.hidden or recipe.last != "none":
        raise ExposedCutError(
            f"only one linear layer can be shared, and party '{party}' has another bottom",
            got=f"bottom = '{bottom}'",
            want="bottom = 'mlp:hidden=none', and depth in the top",
        )


def _check_listed(make: Callable[[str], object], spec: str) -> None:
    """One of several specs in a list; the message says which."""
    try:
        make(spec)
    except SpecError as error:
        error.what = f"{spec}: {error.what}"
        raise


def _check_attack(spec: str) -> None:
    """An attack, or the name of several."""
    if spec in PACKS:
        return
    from vfl import attacks

    try:
        attacks.make(spec)
    except UnknownNameError as error:
        error.want = f"{error.want}; or several at once: {', '.join(PACKS)}"
        raise


def _check_adversary(spec: str) -> None:
    """An adversary, or nobody."""
    if spec != "none":
        from vfl.attacks.active import make_adversary

        make_adversary(spec)


def _list(content: Mapping[str, Any], table: str, key: str) -> Sequence[object]:
    """A list of specs in a table; one spec needs no list."""
    found = _table(content, table).get(key, ())
    return [found] if isinstance(found, str) else found if isinstance(found, list | tuple) else ()


def _check_defense(task: object, spec: str) -> None:
    defense = defenses.make(spec)
    if task == "regression":  # how many classes there are is known when the labels are read
        defense.prepare(defenses.LabelKind(classes=None))


#: Hooks that need cuts and labels, or what both ends agree on, at parties without a link.
_JOINING = ("batch", "fit", "loss")


def check_beside_middle(spec: str) -> None:
    """Refuse a defense that would have to look at both sides of a middle.

    Raises:
        SpecError: it cannot be built, or with the hook that has no place.
    """
    if found := defenses.uses(defenses.make(spec), *_JOINING):
        raise SpecError(
            "this defense needs cuts and labels together, which [middle] keeps apart",
            got=f"'{spec}', for its '{found[0]}'",
            want="a defense of labels, outputs and gradients at the label party alone, or of cuts "
            "at the feature parties alone",
            fix="label_dp, gradient_noise, marvell, nopeek or clipped_noise, for example",
        )


def _check_known_beside_middle(spec: str) -> None:
    """The same; what cannot be built is told where it stands."""
    with suppress(UnknownNameError, UnknownOptionError, BadOptionError):
        check_beside_middle(spec)


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}
