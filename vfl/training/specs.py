"""Checks of the plug-ins in an experiment's settings, before anything runs.

`vfl.config.validate` has all other rules of a configuration, and maps settings to plug-in families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vfl import compression, defenses, models
from vfl.config import (
    WANTED,
    DataSettings,
    Experiment,
    LabelSettings,
    Locations,
    PartySettings,
    TrainSettings,
    read_experiment,
)
from vfl.config.experiment import NETWORK, DPSettings
from vfl.config.grid import PACKS
from vfl.config.toml import Mistake, mistakes_of, raise_mistakes
from vfl.config.toml import check as check_settings
from vfl.config.validate import named_plugins, of_training_here, table_in
from vfl.core.errors import (
    BadOptionError,
    ConfigError,
    ExposedCutError,
    PrivacyError,
    SpecError,
    UnknownNameError,
    UnknownOptionError,
    nearest,
)
from vfl.core.registry import parse, parts
from vfl.datasets import sources
from vfl.datasets.augment import AUGMENTATIONS
from vfl.models.losses import make_loss
from vfl.models.mlp import MLPBottom
from vfl.models.optimizers import NO_SCHEDULE, Optimization
from vfl.session.dp_plan import refuse_codec, refuse_defense
from vfl.session.trace import trace_of_masked_cuts


def read_checked(path: Path, overrides: Sequence[str] = ()) -> tuple[Experiment, Locations]:
    """Read an experiment file that one process can train; also return the line of each setting.

    Raises:
        ConfigError, SpecError: the experiment has mistakes; the error lists all mistakes.
    """
    experiment = read_experiment(path, overrides, spec_mistakes)
    locations = Locations.of(path, overrides)
    here = mistakes_of(mistakes_here(experiment))
    raise_mistakes([*mistakes_in(experiment, locations), *here], locations)
    return experiment, locations


def checked(content: Mapping[str, Any], where: str) -> Experiment:
    """Return an experiment from Python arguments, after the same checks as for a file.

    Args:
        content: the settings.
        where: noun for the arguments in error messages.

    Raises:
        ConfigError, SpecError: see `read_checked`.
    """
    experiment = check_settings(content, Experiment, where, spec_mistakes)
    check_specs(experiment, Locations(where, dict.fromkeys(((key,) for key in content), 0)))
    return experiment


def check_specs(experiment: Experiment, locations: Locations | None = None) -> None:
    """Build every plug-in in an experiment's settings, to report wrong specs before a run.

    Args:
        experiment: the experiment to check.
        locations: file and line of each setting, for error messages.

    Raises:
        SpecError: a spec is wrong; the error names the most similar valid name or option, or the
            widths that would fit.
        ConfigError: several specs are wrong; the error lists all of them.
    """
    locations = locations or Locations()
    raise_mistakes(list(mistakes_in(experiment, locations)), locations)


def check_codecs(specs: Sequence[str], width: int, setting: str) -> None:
    """Build every codec for a cut of this width, and report all wrong specs at once.

    Args:
        specs: the codecs.
        width: width of the cut.
        setting: name of the setting in error messages.

    Raises:
        SpecError, ConfigError: see `check_specs`.
    """
    wrong = []
    for spec in specs:
        try:
            _check_codec(spec, [width])
        except SpecError as error:
            wrong.append(((f"{setting} {spec}",), error))
    raise_mistakes(wrong, Locations())


def mistakes_in(experiment: Experiment, locations: Locations) -> Iterator[Mistake]:
    """Yield the wrong specs of an experiment, each with the name of its setting in the file."""
    from vfl.session.secure_mode import SECURE

    content, written = experiment.model_dump(), locations.lines
    name, _ = parse(experiment.secure)
    # --set may give a model to a file with secure = "none"; then both settings are written
    mode = name in SECURE.names() and not SECURE.member(name).reads_cells
    if name != "none" and ("model",) in written and not (mode and ("secure",) in written):
        content["model"] = content.pop("secure")
    return spec_mistakes(content)


def mistakes_here(experiment: Experiment) -> Iterator[ConfigError]:
    """Yield mistakes other than wrong specs, for one process that runs all parties."""
    from vfl.session import secure_mode

    apart = False
    with suppress(SpecError):  # another check reports a mode that cannot be built
        apart = secure_mode.make(experiment.secure).divides_rows
    return of_training_here(experiment, sources.own_parts(experiment.data.source), apart)


def spec_mistakes(content: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield the wrong specs among settings that are not yet checked; see `vfl.config.read_toml`."""
    for named in named_plugins(content):
        try:
            _ASKED[named.family](named.spec, named.beside)
        except SpecError as error:
            if named.listed:
                error.what = f"{named.spec}: {error.what}"
            yield named.setting, error


def _check_codec(spec: str, widths: Sequence[object]) -> None:
    codec = compression.make(spec)
    for width in widths:
        if isinstance(width, int) and width > 0:
            codec.check(width)


def _check_merger(spec: str, widths: Sequence[object]) -> None:
    """Check that a merger exists, and that it can merge cuts of the widths that are known."""
    merger, known = models.make_merger(spec), [one for one in widths if isinstance(one, int)]
    if known == [*widths] and known:
        merger.width(known)


def _check_steps(content: Mapping[str, Any], **changed: str) -> None:
    """Build the optimiser with all its settings; other checks report invalid single values."""
    try:
        settings = TrainSettings.model_validate({**table_in(content, "train"), **changed})
    except ValueError:
        return
    _ = Optimization(settings).copies  # the optimiser is built only to detect mistakes


def _check_schedule(content: Mapping[str, Any]) -> None:
    """Build the learning-rate schedule; `_check_steps` reports a wrong optimiser spec."""
    try:
        _check_steps(content, schedule=NO_SCHEDULE)
    except SpecError:
        return
    _check_steps(content)


def _check_secure(spec: str, content: Mapping[str, Any]) -> None:
    """Check a secure mode in combination with other settings; "none" fits all settings."""
    if spec == "none":
        return
    from vfl.session import secure_mode
    from vfl.session.secure_mode import SECURE, shares_weights

    if (name := parse(spec)[0]) not in SECURE.names():
        modes = [one for one in SECURE.names() if not SECURE.member(one).reads_cells]
        raise UnknownNameError(
            f"no secure mode is called '{name}'",
            want=", ".join(modes),
            fix=nearest(name, modes),
        )
    parties, names = table_in(content, "parties"), ("codec", "defense", "merge")
    dp = content.get("dp")
    named: dict[str, Any] = {name: str(content[name]) for name in names if name in content}
    named["secure"] = spec
    # The mode is built from unchecked settings; other checks report mistakes in the rest of the
    # experiment.
    chosen = Experiment.model_construct(
        **named,
        label=LabelSettings.model_construct(**table_in(content, "label")),
        train=TrainSettings.model_construct(**table_in(content, "train")),
        data=DataSettings.model_construct(**table_in(content, "data")),
        dp=DPSettings.model_construct(**dp) if isinstance(dp, Mapping) else None,
        parties={
            name: PartySettings.model_construct(**table_in(parties, name)) for name in parties
        },
    )
    mode = secure_mode.make(spec)
    if mode.ring(max(1, len(chosen.feature_parties))) is None and not mode.whole_network:
        return
    try:
        mode.refuse(chosen)
        if shares_weights(chosen) and not mode.whole_network:
            for name in chosen.feature_parties:
                _check_linear(name, str(chosen.parties[name].bottom))
    except (ExposedCutError, PrivacyError):
        raise
    except SpecError:
        return  # the checks of codec, defense and bottom report this error
    trace = table_in(content, "trace")
    if trace.get("phases") or trace.get("snapshots"):
        raise trace_of_masked_cuts()


def _check_model(spec: str, content: Mapping[str, Any]) -> None:
    """Check a model that replaces the neural network; only neural networks have secure modes."""
    from vfl.session.secure_mode import SECURE

    name, _ = parse(spec)
    if name in SECURE.names() and SECURE.member(name).reads_cells:
        try:
            _check_secure(spec, content)
        except UnknownOptionError as error:
            error.what = error.what.replace(SECURE.kind, "model", 1)
            raise
        return
    known = [NETWORK, *(one for one in SECURE.names() if SECURE.member(one).reads_cells)]
    raise UnknownNameError(
        f"no model is called '{name}'",
        want=", ".join(known),
        fix=f"secure = '{spec}'" if name in SECURE.names() else nearest(name, known),
    )


def _check_linear(party: str, bottom: str) -> None:
    """Check a bottom model whose weights feature parties secret-share."""
    recipe = models.make_bottom(bottom)
    if not isinstance(recipe, MLPBottom) or recipe.hidden or recipe.last != "none":
        raise ExposedCutError(
            f"only one linear layer can be shared, and party '{party}' has another bottom",
            got=f"bottom = '{bottom}'",
            want="bottom = 'mlp:hidden=none', and depth in the top",
        )


def _check_attack(spec: str) -> None:
    """Check the spec of an attack, or the name of a pack of attacks."""
    if spec in PACKS:
        return
    from vfl import attacks

    try:
        attacks.make(spec)
    except UnknownNameError as error:
        error.want = f"{error.want}; or several at once: {', '.join(PACKS)}"
        raise


def _check_adversary(spec: str) -> None:
    """Build an adversary, unless the spec is "none"."""
    if spec != "none":
        from vfl.attacks.active import make_adversary

        make_adversary(spec)


def _check_rules(spec: str) -> None:
    from vfl.datasets.alignment.ids import make_rules

    make_rules(spec)


def _check_protocol(spec: str) -> None:
    from vfl.datasets.alignment.protocols import PROTOCOLS

    PROTOCOLS.make(spec)


def _check_augmentation(spec: str) -> None:
    for one in () if spec == "none" else parts(spec):
        AUGMENTATIONS.make(one)


def _check_defense(spec: str, numbers: bool) -> None:
    defense = defenses.make(spec)
    if numbers:  # the number of classes is unknown before the labels are read
        defense.prepare(defenses.LabelKind(classes=None, scaled=True))


#: Defense hooks that need both cuts and labels, or a value that two parties without a common link
#: agree on.
_JOINING = ("batch", "fit", "loss")


def check_beside_middle(spec: str) -> None:
    """Raise an error for a defense that needs data from both neighbours of a middle party.

    Raises:
        SpecError: the defense cannot be built, or needs a hook that a middle party makes
            impossible.
    """
    if found := defenses.uses(defenses.make(spec), *_JOINING):
        raise SpecError(
            "this defense needs cuts and labels at one party, but [middle] separates them",
            got=f"'{spec}', for its '{found[0]}'",
            want="a defense of labels, outputs and gradients at the label party alone, or of cuts "
            "at the feature parties alone",
            fix="label_dp:epsilon=2, gradient_noise, marvell, nopeek or clipped_noise, for example",
        )


def _check_known_beside_middle(spec: str) -> None:
    """Check a defense beside a middle party; another check reports specs that cannot be built."""
    with suppress(UnknownNameError, UnknownOptionError, BadOptionError):
        check_beside_middle(spec)


def _beside_dp(refuse: Callable[[str, Any], object], spec: str, beside: Any) -> None:
    """Report only errors that [dp] causes; other checks report specs that cannot be built."""
    try:
        refuse(spec, beside)
    except PrivacyError:
        raise
    except SpecError:
        return


#: Check function of a plug-in, by family; the arguments are the spec and the values that the
#: plug-in must fit.
_ASKED: Mapping[str, Callable[[str, Any], object]] = {
    "codec": _check_codec,
    # The number 1 stands for an integer that vfl finds later, in place of `?`.
    "wanted codec": lambda spec, widths: _check_codec(spec.replace(WANTED, "1"), widths),
    "defense": _check_defense,
    "defense beside a middle": lambda spec, _: _check_known_beside_middle(spec),
    "codec beside dp": lambda spec, widths: _beside_dp(
        refuse_codec, spec, [width for width in widths if isinstance(width, int) and width > 0]
    ),
    "defense beside dp": lambda spec, sampling: _beside_dp(refuse_defense, spec, sampling),
    "secure": _check_secure,
    "model": _check_model,
    "data set": lambda spec, _: sources.make(spec),
    "id rules": lambda spec, _: _check_rules(spec),
    "alignment": lambda spec, _: _check_protocol(spec),
    "merger": _check_merger,
    "optimizer": lambda _, content: _check_steps(content, schedule=NO_SCHEDULE),
    "schedule": lambda _, content: _check_schedule(content),
    "bottom": lambda spec, _: models.make_bottom(spec),
    "augmentation": lambda spec, _: _check_augmentation(spec),
    "top": lambda spec, _: models.make_top(spec),
    "loss": lambda spec, task: make_loss(spec, str(task)),
    "adversary": lambda spec, _: _check_adversary(spec),
    "attack": lambda spec, _: _check_attack(spec),
}
