"""Advice on defenses for an experiment: who sees what, and which measurements support a defense.

`advice.toml`, next to this file, is the only source of `vfl advise` and of the table in
docs/defenses.md. Promises with an epsilon come from the defenses' own statements.
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

#: Goals of an attacker: labels, columns, membership in the training, the answers, a party's inputs
#: from a hijacked bottom, or facts that lengths of frames reveal.
Asset = Literal["labels", "columns", "records", "answers", "inputs", "lengths"]
ASSETS: tuple[Asset, ...] = get_args(Asset)
#: "proven" holds by a statement or by the content of messages; "measured" withstood the attacks of
#: a page; "partial" hides a part; "weak" was defeated by a known attack; "open" has no defense.
Status = Literal["proven", "measured", "partial", "weak", "open"]
_BEST_FIRST: tuple[Status, ...] = get_args(Status)
#: Secure modes of a network with bottoms and a top; any other mode is a separate model.
_NETWORKS = ("none", "sum", "beaver", "permuted", "pea")

_FILE = Path(__file__).with_name("advice.toml")


@dataclass(frozen=True, slots=True)
class Advice:
    """One line of the table: a risk, and a setting against it.

    Attributes:
        name: its name in the output of the command.
        status: the best level of protection.
        fear: the owner's fear.
        asset: the attacked asset; `also` names further assets that this setting protects.
        attackers: roles of attackers against which the setting protects.
        set: the setting.
        costs: costs in accuracy, bytes or time.
        proven: claim that holds by proof or by the content of frames; "nothing" if no claim does.
        measured: measured success of attacks.
        source: the page with the figures, below docs.
        defense, secure, dp, padded: settings by which an experiment is recognised. A defense
            "NAME:OPTION" counts if the option is given.
        most_epsilon: largest epsilon with which such an option counts.
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
        """Return whether it protects these data from an attacker in this role."""
        return asset in (self.asset, *self.also) and role in self.attackers

    def in_place(self, experiment: Experiment) -> bool:
        """Return whether an experiment uses it."""
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
        """Return whether the model of an experiment supports it."""
        mode = parse(experiment.secure)[0]
        if mode not in _NETWORKS:
            return False
        if mode not in ("none", "sum"):
            return not self.defense
        return all(_takes(wanted.partition(":")[0], experiment) for wanted in self.defense)


def _takes(name: str, experiment: Experiment) -> bool:
    """Return whether a defense can work on the merged cut of an experiment."""
    if defenses.DEFENSES.member(name).merged is defenses.Defense.merged:
        return True
    try:
        defenses.make(name).merged(Terms.of(experiment, "train", experiment.name).merged_blocks)
    except SpecError:
        return False
    return True


def _number(given: Mapping[str, str], option: str) -> float:
    """Return the number of an option; negative if the option is not given."""
    return float(given.get(option, -1))


@dataclass(frozen=True, slots=True)
class Weak:
    """Defenses that fell to a known attack.

    Attributes:
        defenses: their names.
        asset: the asset that they should protect.
        why: the reason, in a sentence.
        source: the page with the figures, below docs.
    """

    defenses: Sequence[str]
    asset: Asset
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """Measurements on a model that replaces bottoms and top.

    Attributes:
        mode: the model's name.
        asset: the attacked asset.
        status: level of protection by the model itself.
        measured: measured success of attacks.
        source: the page with the figures, below docs.
    """

    mode: str
    asset: Asset
    status: Status
    measured: str
    source: str


@dataclass(frozen=True, slots=True)
class Exposure:
    """Evidence of one attacker about data that another party owns.

    Attributes:
        asset, owner: the asset and the party that owns it.
        attacker, role: name and role of the attacking party.
        sees: the evidence, in words.
    """

    asset: Asset
    owner: str
    attacker: str
    role: str
    sees: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An exposure, and the defenses that measurements support against it.

    Attributes:
        exposure: the exposed asset and the attacker.
        status: level of protection.
        has: advice that the experiment follows.
        statements: promises of its defenses about the asset, each with its unit and span.
        weak: sentences on defenses in use that are too weak to rely on.
        measured: sentences on the model itself.
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
        """Return a record for JSON."""
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
    """Return every line of the table, in its order."""
    return tuple(Advice(**row) for row in _content()["advice"])


@cache
def weak_defenses() -> tuple[Weak, ...]:
    """Return defenses that are too weak to be used alone."""
    return tuple(Weak(**row) for row in _content()["weak"])


@cache
def model_evidence() -> tuple[ModelEvidence, ...]:
    """Return measurements on models that are not networks with bottoms."""
    return tuple(ModelEvidence(**row) for row in _content()["model"])


def _content() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def advice_table() -> Table:
    """Return the table of docs/defenses.md."""
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
    """Yield every exposure of an experiment, in its training and in its outputs."""
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
            "answers", label, party, "feature party", "its messages determine every answer"
        )
        if mode == "none":
            yield Exposure("inputs", party, label, "label party", "it chooses the gradients")
    if middle:
        sees = "gradients of the head's inputs, and every cut"
        yield Exposure("labels", label, middle, "middle", sees)
    for one in others:
        yield Exposure("labels", one, label, "label party", "the same cuts, which both tasks train")
    holder = "anyone who holds a model or asks for predictions"
    yield Exposure("records", "every party", holder, "model holder", "weights, or answers")
    yield Exposure(
        "lengths", "every party", "an observer of the link", "network", "bytes and times"
    )


def _of_labels(mode: str, middle: str | None, party: str) -> str:
    if mode in ("beaver", "permuted", "pea"):
        return "shares, and no gradient"
    if mode not in ("none", "sum"):
        return f"what the model '{mode}' sends it, such as its splits in their order"
    return f"the gradient of {party}'s cut in every step, and its own bottom"


def _of_columns(mode: str, party: str) -> str:
    if mode == "sum":
        return "the sum of all parties' cuts, in training and at every query"
    if mode == "beaver":
        return "the sum of all parties' first layers"
    if mode in ("permuted", "pea"):
        return "shares, and what that protocol opens"
    if mode != "none":
        return f"what the model '{mode}' sends it, such as bins of {party}'s columns"
    return f"{party}'s cut of every row, in training and at every query"


def findings_of(experiment: Experiment, assets: Sequence[Asset] = ASSETS) -> list[Finding]:
    """Findings for each exposure of an experiment.

    Args:
        experiment: a checked experiment; the function reads no data.
        assets: assets to judge.

    Raises:
        SpecError: a defense or a codec cannot be built.
    """
    compression.make(experiment.codec)
    mode = secure_mode.make(experiment.secure)
    promised: Sequence[PrivacyStatement] = getattr(mode, "privacy", tuple)()  # of a whole model
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


#: Names of assets in the statements of defenses.
_STATED: dict[Asset, str] = {"labels": "labels", "columns": "inputs", "records": "records"}
