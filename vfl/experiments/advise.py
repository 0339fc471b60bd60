"""Advice on defenses for an experiment: what attackers see, and the evidence for defenses.

`advice.toml`, next to this file, is the only source of `vfl advise` and of the table in
docs/defenses.md. Privacy guarantees with an epsilon come from the privacy statements of the
defenses.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from vfl import compression, defenses
from vfl.config import Experiment
from vfl.core.errors import SpecError
from vfl.core.registry import parse
from vfl.experiments.tables import Table
from vfl.privacy import PrivacyStatement
from vfl.session import Terms, secure_mode

#: Assets that an attacker may want: labels, columns, membership of rows in the training (records),
#: answers, a party's inputs (through a hijacked bottom model), or facts that frame lengths reveal.
Asset = Literal["labels", "columns", "records", "answers", "inputs", "lengths"]
ASSETS: tuple[Asset, ...] = get_args(Asset)
#: Level of protection of an asset. "proven": a privacy statement or the content of messages
#: guarantees the protection. "measured": the defense withstood the attacks on a results page.
#: "partial": the defense protects a part of the asset. "weak": a known attack defeated the defense.
#: "open": the asset has no defense.
Status = Literal["proven", "measured", "partial", "weak", "open"]
_BEST_FIRST: tuple[Status, ...] = get_args(Status)
#: Secure modes for models with bottom and top models; every other mode is a model of another kind.
_NETWORKS = ("none", "sum", "beaver", "permuted", "pea")

_FILE = Path(__file__).with_name("advice.toml")


@dataclass(frozen=True, slots=True)
class Advice:
    """One row of the advice table: a risk, and a setting that protects from this risk.

    Attributes:
        name: name of the advice in the output of `vfl advise`.
        status: highest level of protection that the setting reaches.
        fear: the data owner's fear, as a question or a sentence.
        asset: the asset that an attacker wants; `also` lists further assets that this setting
            protects.
        attackers: roles of attackers against which the setting protects.
        set: the setting.
        costs: costs of the setting in accuracy, bytes or time.
        proven: claim that a proof or the content of frames guarantees; "nothing" if there is no
            such claim.
        measured: measured success of attacks against this setting, as text.
        source: the docs page with the measured figures, relative to docs/.
        defense, secure, dp, padded: an experiment with one of these values of its settings follows
            the advice. A defense written as "NAME:OPTION" counts only if the experiment sets the
            option.
        most_epsilon: largest value of a defense's epsilon option with which the experiment follows
            the advice.
    """

    name: str
    status: Status
    fear: str
    asset: Asset
    attackers: Sequence[str]
    set: str
    costs: str
    proven: str
    measured: str
    source: str
    also: Sequence[Asset] = ()
    defense: Sequence[str] = ()
    secure: Sequence[str] = ()
    dp: bool = False
    padded: bool = False
    most_epsilon: float = inf

    def holds_for(self, asset: Asset, role: str) -> bool:
        """Return whether this advice protects an asset from an attacker in a role."""
        return asset in (self.asset, *self.also) and role in self.attackers

    def in_place(self, experiment: Experiment) -> bool:
        """Return whether an experiment follows this advice."""
        named = [parse(spec) for spec in experiment.defense.split("+")]
        for wanted in self.defense:
            name, _, option = wanted.partition(":")
            for one, given in named:
                if one == name and (not option or 0 <= _number(given, option) <= self.most_epsilon):
                    return True
        if self.padded:
            network = parse(experiment.secure)[0] in _NETWORKS
            return network and parse(experiment.codec)[1].get("pad") != "no"
        if self.dp and experiment.dp is not None:
            return True
        return parse(experiment.secure)[0] in self.secure

    def fits(self, experiment: Experiment) -> bool:
        """Return whether this setting is possible with an experiment's model."""
        mode = parse(experiment.secure)[0]
        if mode not in _NETWORKS:
            return False
        if mode not in ("none", "sum"):
            return not self.defense
        return all(_takes(wanted.partition(":")[0], experiment) for wanted in self.defense)


def _takes(name: str, experiment: Experiment) -> bool:
    """Return whether a defense can process an experiment's merged cuts."""
    if defenses.DEFENSES.member(name).merged is defenses.Defense.merged:
        return True
    try:
        defenses.make(name).merged(Terms.of(experiment, "train", experiment.name).merged_blocks)
    except SpecError:
        return False
    return True


def _number(given: Mapping[str, str], option: str) -> float:
    """Return a spec option's value as a number; negative if the spec lacks the option."""
    return float(given.get(option, -1))


@dataclass(frozen=True, slots=True)
class Weak:
    """Defenses that a known attack defeated.

    Attributes:
        defenses: their names.
        asset: the asset that these defenses should protect.
        why: the reason why these defenses are weak, as a sentence.
        source: the docs page with the measured figures, relative to docs/.
    """

    defenses: Sequence[str]
    asset: Asset
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """Measurements of attacks on a model that replaces bottom and top models.

    Attributes:
        mode: the model's name in specs.
        asset: the asset that is attacked.
        status: level of protection that the model itself gives.
        measured: measured success of attacks on the model, as text.
        source: the docs page with the measured figures, relative to docs/.
    """

    mode: str
    asset: Asset
    status: Status
    measured: str
    source: str


@dataclass(frozen=True, slots=True)
class Exposure:
    """Knowledge of one attacker about an asset of another party.

    Attributes:
        asset, owner: the exposed asset, and the party that owns it.
        attacker, role: name and role of the attacking party.
        sees: the messages or models that the attacker sees, as text.
    """

    asset: Asset
    owner: str
    attacker: str
    role: str
    sees: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An exposure, with the defenses that evidence supports against it.

    Attributes:
        exposure: the exposed asset and its attacker.
        status: level of protection of the asset.
        has: advice that the experiment already follows against this exposure.
        statements: privacy guarantees of the experiment's defenses for the asset, with unit and
            range.
        weak: sentences about the experiment's defenses that are too weak to rely on.
        measured: sentences with measurements on the experiment's model itself.
        take: further advice that would protect the asset.
    """

    exposure: Exposure
    status: Status
    has: Sequence[Advice] = ()
    statements: Sequence[str] = ()
    weak: Sequence[str] = ()
    measured: Sequence[str] = ()
    take: Sequence[Advice] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON-serialisable record."""
        return asdict(self.exposure) | {
            "status": self.status,
            "has": [one.name for one in self.has],
            "statements": list(self.statements),
            "weak": list(self.weak),
            "measured": list(self.measured),
            "take": [{"name": one.name, "set": one.set} for one in self.take],
        }


@cache
def advices() -> tuple[Advice, ...]:
    """Return all rows of the advice table, in the order of `advice.toml`."""
    return tuple(Advice(**row) for row in _content()["advice"])


@cache
def weak_defenses() -> tuple[Weak, ...]:
    """Return the defenses that known attacks defeated."""
    return tuple(Weak(**row) for row in _content()["weak"])


@cache
def model_evidence() -> tuple[ModelEvidence, ...]:
    """Return the measurements on models that replace bottom and top models."""
    return tuple(ModelEvidence(**row) for row in _content()["model"])


def _content() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def advice_table() -> Table:
    """Return the advice table as in docs/defenses.md."""
    head = ["what you fear", "what to set", "what it costs", "proven", "only measured"]
    lines = [
        [
            *(one.fear, _code(one.set), one.costs, one.proven),
            f"{one.measured} ([figures]({one.source}))",
        ]
        for one in advices()
    ]
    return Table(head, lines, 5)


def _code(setting: str) -> str:
    return setting if "`" in setting else f"`{setting}`"


def exposures(experiment: Experiment) -> Iterator[Exposure]:
    """Yield the exposures of an experiment, in its training and in its predictions."""
    label, mode = experiment.label.party, parse(experiment.secure)[0]
    middle = experiment.middle.party if experiment.middle else None
    others = [task.party for task in experiment.tasks or ()]
    for party in experiment.feature_parties:
        yield Exposure("labels", label, party, "feature party", _of_labels(mode, middle, party))
        reader = middle or label
        role = "middle" if middle else "label party"
        for attacker, as_what in [(reader, role), *((one, "label party") for one in others)]:
            sees = _of_columns(mode, party)
            yield Exposure("columns", party, attacker, as_what, sees)
        yield Exposure(
            "answers",
            label,
            party,
            "feature party",
            "messages of this party, which determine every answer",
        )
        if mode == "none":
            yield Exposure("inputs", party, label, "label party", "it chooses the gradients")
    if middle:
        sees = "gradients of the head's inputs, and every cut"
        yield Exposure("labels", label, middle, "middle", sees)
    for one in others:
        yield Exposure(
            "labels",
            one,
            label,
            "label party",
            "the same cuts, which the tasks of both label parties train",
        )
    holder = "anyone who has a model or requests predictions"
    yield Exposure("records", "every party", holder, "model holder", "weights, or answers")
    yield Exposure(
        "lengths", "every party", "an observer of the network", "network", "bytes and times"
    )


def _of_labels(mode: str, middle: str | None, party: str) -> str:
    if mode in ("beaver", "permuted", "pea"):
        return "shares, and no gradient"
    if mode not in ("none", "sum"):
        return f"messages of the model '{mode}', such as its splits in their order"
    return f"the gradient of {party}'s cut in every step, and {party}'s bottom model"


def _of_columns(mode: str, party: str) -> str:
    if mode == "sum":
        return "the sum of all parties' cuts, in training and at every query"
    if mode == "beaver":
        return "the sum of the outputs of all parties' first layers, in training and at every query"
    if mode in ("permuted", "pea"):
        return "shares, and the values that the protocol opens"
    if mode != "none":
        return f"messages of the model '{mode}', such as bins of {party}'s columns"
    return f"{party}'s cut of every row, in training and at every query"


def findings_of(experiment: Experiment, assets: Sequence[Asset] = ASSETS) -> list[Finding]:
    """Return a finding for each exposure of an experiment.

    Args:
        experiment: a checked experiment; this function does not read the experiment's data.
        assets: assets whose exposures are included.

    Raises:
        SpecError: a defense or a codec cannot be built.
    """
    compression.make(experiment.codec)
    mode = secure_mode.make(experiment.secure)
    # only models that replace bottom and top models have such statements
    promised: Sequence[PrivacyStatement] = getattr(mode, "privacy", tuple)()
    stated = (*defenses.make(experiment.defense).privacy(), *promised)
    named = {parse(spec)[0] for spec in experiment.defense.split("+")}
    return [
        _finding(one, experiment, stated, named)
        for one in exposures(experiment)
        if one.asset in assets
    ]


def _finding(
    exposure: Exposure,
    experiment: Experiment,
    stated: Sequence[PrivacyStatement],
    named: set[str],
) -> Finding:
    fitting = [one for one in advices() if one.holds_for(exposure.asset, exposure.role)]
    has = [one for one in fitting if one.in_place(experiment)]
    about = [one for one in stated if one.protects == _STATED.get(exposure.asset)]
    weak = [
        f"{name}: {one.why} ({one.source})"
        for one in weak_defenses()
        for name in one.defenses
        if one.asset == exposure.asset and name in named
    ]
    name = parse(experiment.secure)[0]
    known = [one for one in model_evidence() if (one.mode, one.asset) == (name, exposure.asset)]
    given: list[Status] = [one.status for one in has] + [one.status for one in known]
    given.append("weak" if weak else "open")
    if name not in _NETWORKS and any(one.epsilon is not None for one in about):
        given.append("partial")
    status = min(given, key=_BEST_FIRST.index)
    return Finding(
        exposure,
        status,
        has,
        [str(one) for one in about],
        weak,
        [f"{one.measured} ({one.source})" for one in known],
        [one for one in fitting if one not in has and one.fits(experiment)],
    )


#: Names of assets, as privacy statements of defenses use them.
_STATED: dict[Asset, str] = {"labels": "labels", "columns": "inputs", "records": "records"}
