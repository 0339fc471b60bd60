"""The adversary's knowledge: threat models with their grants, evidence, and the attacker's view.

A `ThreatModel` names the attacker, the phase of the attack, and the attacker's grants: the kinds of
values that it may read. `Holdings` contains everything that a threat model can grant. A `View`
gives access to the granted values, and raises an error for other values. Models are available as
functions that return copies, so that an attack may change its copy. A view never gives access to
the values of the target rows that the attack infers; only `vfl.attacks.scoring` reads them.

A threat model is counterfactual if it has a grant that no attacker of its kind has in a real
deployment. Results under a counterfactual threat model are upper bounds, and reports mark them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from vfl.attacks.transcript import RecordedExchange, SentCuts, Transcript
from vfl.core.errors import NotGrantedError, UserError

Held = TypeVar("Held")
Who = Literal["feature party", "label party", "outsider"]
Phase = Literal["training", "inference"]
Behaviour = Literal["semi-honest", "malicious"]
TrainedBy = Literal["owner", "split"]
#: Level of an attacker's access to the model, ascending; each level includes the previous levels.
Access = Literal["cut", "bottom", "gradients", "active"]


class Grant(StrEnum):
    """One kind of knowledge that an attacker may have; reports use the member's value."""

    INPUTS = "its own columns"
    BOTTOM = "its own bottom"
    CUTS = "the cuts that travelled"
    GRADIENTS = "the gradients that travelled"
    SNAPSHOTS = "its own bottom after every epoch"
    EPOCHS = "the cuts of every epoch"
    QUERIES = "the cuts of queries it repeats"
    LEAKED = "a few leaked labels"
    UNLABELLED = "further rows without labels"
    PRIOR = "how frequent each class is"
    BOTTOM_RECIPE = "the architecture of the bottom"
    TOP_RECIPE = "the architecture of the top"
    LABELS = "its own labels"
    TOP = "its own top"
    OUTPUTS = "the predictions"
    LEAKED_INPUTS = "a few leaked rows of the victim's columns"
    LEAKED_ATTRIBUTES = "a hidden attribute of a few rows"
    OTHERS_BOTTOM = "the victim's bottom"
    OTHERS_TOP = "the label party's top"
    PARTNERS = "the holdings of its partners"
    PROTOCOL = "messages of the model's own protocol"
    AUXILIARY = "a few rows of the same kind with their labels"
    MIDDLE = "its own layers between the two cuts"


#: Grants that exist only in the training phase.
IN_TRAINING = frozenset({Grant.GRADIENTS, Grant.EPOCHS})
#: Grants by which the access level is at least "bottom": a bottom, or the columns that it reads.
_AT_THE_BOTTOM = frozenset({Grant.BOTTOM, Grant.INPUTS, Grant.SNAPSHOTS})
#: Grants of public facts, and of data that colluding parties share with the attacker.
_PUBLIC = {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE, Grant.PRIOR, Grant.PARTNERS}
_BOTH = {Grant.CUTS, Grant.GRADIENTS, Grant.SNAPSHOTS, Grant.OUTPUTS, Grant.EPOCHS}
_BOTH |= {Grant.QUERIES, Grant.PROTOCOL}
#: For each kind of party, the grants that it can have without breaking into another party's
#: machine.
OBTAINABLE: dict[str, frozenset[Grant]] = {
    "feature party": frozenset(
        {Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED, Grant.UNLABELLED, *_BOTH, *_PUBLIC}
    ),
    "label party": frozenset(
        {Grant.LABELS, Grant.TOP, Grant.INPUTS, Grant.BOTTOM, Grant.LEAKED_INPUTS}
        | {Grant.LEAKED_ATTRIBUTES, Grant.AUXILIARY, Grant.MIDDLE, *_BOTH, *_PUBLIC}
    ),
    # An outsider has the rows with which it queries the model, and other rows of the same kind.
    "outsider": frozenset(
        {Grant.INPUTS, Grant.OUTPUTS, Grant.LABELS, Grant.LEAKED_INPUTS, *_PUBLIC}
    ),
}


@dataclass(frozen=True, slots=True)
class ThreatModel:
    """The attacker and its grants; an attack can read only granted values.

    Attributes:
        who: kind of the attacking party ("feature party", "label party" or "outsider").
        phase: phase from which the attacker's recordings come; in the inference phase, it has no
            recording of the training.
        grants: kinds of values that the attacker has.
        behaviour: "semi-honest": the attacker follows the protocol; "malicious": the attacker
            tampers with its own part of the network while the victim trains.
        colluding: names of parties that share their data with the attacker; empty if there are
            none.
        trained_by: "owner": one owner trained bottom and top alone and then gave the bottom away
            (thesis 4.1); "split": the feature party trained the bottom in split learning.

    Raises:
        UserError: an attribute has an unknown value; or the grants contradict the phase or the
            colluding parties; or `trained_by` contradicts the phase.
    """

    who: Who
    phase: Phase
    grants: frozenset[Grant]
    behaviour: Behaviour = "semi-honest"
    colluding: tuple[str, ...] = ()
    trained_by: TrainedBy = "split"

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"no such {name}", want=", ".join(get_args(kind)))
        if self.phase == "inference" and (early := self.grants & IN_TRAINING):
            raise UserError(f"{_listed(sorted(early))}: in the training phase only", where="grants")
        if self.colluding and Grant.PARTNERS not in self.grants:
            raise UserError(
                "an attacker whose partners give it nothing does not collude", where="colluding"
            )
        if self.trained_by == "owner" and self.phase == "training":
            raise UserError("an owner that trains alone has no training phase to record")

    @property
    def counterfactual(self) -> frozenset[Grant]:
        """Return the grants of this threat model that no real party of this kind would have."""
        return self.grants - OBTAINABLE[self.who]

    @property
    def access(self) -> Access:
        """Return the level of access to the model, from cuts up to tampering with training."""
        if self.behaviour == "malicious":
            return "active"
        if self.grants & IN_TRAINING:
            return "gradients"
        return "bottom" if self.grants & _AT_THE_BOTTOM else "cut"

    def sentence(self) -> str:
        """Return one sentence about the attacker and its knowledge."""
        alone = f"together with {' and '.join(self.colluding)}" if self.colluding else "alone"
        held = [str(grant) for grant in Grant if grant in self.grants - self.counterfactual]
        beyond = [str(grant) for grant in Grant if grant in self.counterfactual]
        text = f"A {self.behaviour} {self.who}, {alone}, in the {self.phase} phase, holding "
        text += _listed(held) if held else "nothing"
        if beyond:
            text += f", and counterfactually {_listed(beyond)}"
        if self.trained_by == "owner":
            text += "; the owner trained both bottom and top"
        return text + "."


_CHOICES = {"who": Who, "phase": Phase, "behaviour": Behaviour, "trained_by": TrainedBy}


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


Maker = Callable[[], nn.Module]
TopMaker = Callable[[int], nn.Module]
#: A function that joins the victim's cuts and the attacker's cuts, each (rows, width), for the top.
Merge = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """All values known about one group of rows, axes (rows, ...); unknown values are None.

    Attributes:
        inputs: the columns, float32.
        cuts: the cuts as they were sent, float32, axes (rows, width).
        labels: the labels, int64, or float32 for a regression, axes (rows,).
        outputs: the network's outputs, float32, axes (rows, outputs).
        before: function that returns the inputs of the last layer of `Holdings.bottom`, axes (rows,
            features), if they are stored; otherwise None. These inputs could also be computed from
            the bottom and the columns.
        sent: function that returns every message with cuts of these rows, from all epochs or
            repeated queries.
    """

    inputs: Tensor | None = None
    cuts: Tensor | None = None
    labels: Tensor | None = None
    outputs: Tensor | None = None
    before: Callable[[], Tensor] | None = None
    sent: Callable[[], Sequence[SentCuts]] | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows in the group."""
        known = (self.inputs, self.cuts, self.labels, self.outputs)
        return next((len(values) for values in known if values is not None), 0)

    def of(self, chosen: Tensor) -> Evidence:
        """Return the evidence about some of the rows.

        Args:
            chosen: mask of the rows to keep, bool, axes (rows,).
        """
        before, sent, place = self.before, self.sent, chosen.cumsum(0) - 1

        def messages() -> list[SentCuts]:
            assert sent is not None
            kept = [(one, chosen[one.rows]) for one in sent()]
            return [
                SentCuts(one.step, one.epoch, place[one.rows[own]], one.cuts[own])
                for one, own in kept
            ]

        columns = {
            name: None if one is None else one[chosen] for name, one in self._columns.items()
        }
        return Evidence(
            **columns,
            before=None if before is None else lambda: before()[chosen],
            sent=None if sent is None else messages,
        )

    def beside(self, other: Evidence) -> Evidence:
        """Return joint evidence: these rows, then `other`'s rows, with values that both have."""
        pairs = {name: (one, other._columns[name]) for name, one in self._columns.items()}
        before, after = (self.before, other.before), (self.sent, other.sent)

        def messages() -> list[SentCuts]:
            assert after[0] is not None
            assert after[1] is not None
            moved = [replace(one, rows=one.rows + self.rows) for one in after[1]()]
            return [*after[0](), *moved]

        columns = {
            name: None if a is None or b is None else torch.cat([a, b])
            for name, (a, b) in pairs.items()
        }
        return Evidence(
            **columns,
            before=_both(before),
            sent=None if None in after else messages,
        )

    @property
    def _columns(self) -> dict[str, Tensor | None]:
        names = ("inputs", "cuts", "labels", "outputs")
        return {name: getattr(self, name) for name in names}


def _both(before: tuple[Callable[[], Tensor] | None, ...]) -> Callable[[], Tensor] | None:
    first, second = before
    if first is None or second is None:
        return None
    return lambda: torch.cat([first(), second()])


@dataclass(frozen=True, eq=False, repr=False)
class Holdings:
    """All values that a threat model may grant; None marks a value that does not exist.

    Attributes:
        targets: the attacked rows; the values that the attacker wants to infer are absent, or no
            grant gives access to them.
        leaked: rows whose labels (or attribute, or the victim's columns) the attacker knows.
        unlabelled: further rows without labels.
        exchanges: the recorded training, exchange by exchange; if it exists, targets are training
            rows.
        prior: share of each class, axes (classes,).
        bottom: function that returns a copy of the attacker's own trained bottom.
        new_bottom: function that returns an untrained bottom of the same architecture.
        new_top: function that returns an untrained top of the victim's architecture, for cuts of
            the width given as argument.
        top: function that returns a copy of the attacker's trained top (for a label party).
        merge: function that merges the victim's cuts with the attacker's own cuts as input of
            `top`; None if the attacker has no columns.
        others_bottom: function that returns a copy of the victim's trained bottom.
        others_top: function that returns a copy of the label party's trained top (for a feature
            party).
        snapshots: functions, one for each epoch in order, that return copies of the attacker's
            bottom after the epoch.
        partners: views of colluding parties, with the same groups of rows.
        shape: axes of one row of the victim's inputs.
        told: further messages that a model with its own protocol, such as boosted trees, sent to
            the attacker; their type depends on the model.
        middle: function that returns a copy of the layers that the server of a U-shape trains; they
            map the victim's cuts to the cut that goes back, axes (rows, width).
    """

    targets: Evidence = field(default_factory=Evidence)
    leaked: Evidence | None = None
    unlabelled: Evidence | None = None
    exchanges: Sequence[RecordedExchange] | None = None
    prior: Tensor | None = None
    bottom: Maker | None = None
    new_bottom: Maker | None = None
    new_top: TopMaker | None = None
    top: Maker | None = None
    merge: Merge | None = None
    others_bottom: Maker | None = None
    others_top: Maker | None = None
    snapshots: Sequence[Maker] | None = None
    partners: Sequence[View] | None = None
    shape: tuple[int, ...] | None = None
    told: object | None = None
    middle: Maker | None = None


#: For each group of rows, the grants that give access to it; each grant opens at least some values
#: of these rows.
_GROUPS = {
    "leaked": (
        Grant.LEAKED,
        Grant.LEAKED_INPUTS,
        Grant.LEAKED_ATTRIBUTES,
        Grant.AUXILIARY,
    ),
    "unlabelled": (Grant.UNLABELLED,),
}


class _Opened(Generic[Held]):
    """Descriptor: returns the holding of this name if the view has one of the given grants."""

    def __init__(self, *grants: Grant) -> None:
        self._grants = grants

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: View, owner: type) -> Held:
        held: Held | None = getattr(view._holdings, self._name)
        return view.opened(held, *self._grants)


class GrantedRows:
    """One group of rows in an attacker's view; reading a value without its grant raises an error.

    Args:
        view: the view whose grants apply to the group.
        evidence: evidence about the rows.
        leaked: whether these are the leaked rows, for which there are separate grants.
    """

    def __init__(self, view: View, evidence: Evidence, leaked: bool = False) -> None:
        self._view = view
        self._evidence = evidence
        self.leaked = leaked

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self._evidence.rows

    @property
    def inputs(self) -> Tensor:
        """Return the columns, float32, axes (rows, ...)."""
        leaked = (Grant.LEAKED_INPUTS, Grant.AUXILIARY) if self.leaked else ()
        return self._view.opened(self._evidence.inputs, *leaked, Grant.INPUTS)

    @property
    def cuts(self) -> Tensor:
        """Return the cuts as the other party received them, float32, axes (rows, width)."""
        return self._view.opened(self._evidence.cuts, Grant.CUTS)

    @property
    def sent(self) -> Sequence[SentCuts]:
        """Return every message with cuts of these rows, from all epochs or repeated queries."""
        return self._view.opened(self._evidence.sent, Grant.EPOCHS, Grant.QUERIES)()

    @property
    def transcript(self) -> Transcript[SentCuts]:
        """Return the messages of `sent` as a transcript."""
        return Transcript(self.rows, self.sent)

    @property
    def labels(self) -> Tensor:
        """Return the labels, or the leaked attribute, int64 or float32, axes (rows,)."""
        own = (Grant.LEAKED, Grant.LEAKED_ATTRIBUTES, Grant.AUXILIARY)
        leaked = own if self.leaked else ()
        return self._view.opened(self._evidence.labels, *leaked, Grant.LABELS)

    @property
    def before(self) -> Tensor | None:
        """Return stored inputs of the bottom's last layer, axes (rows, features), or None."""
        self._view.require(Grant.INPUTS)
        self._view.require(Grant.BOTTOM)
        kept = self._evidence.before
        return None if kept is None else kept()

    @property
    def outputs(self) -> Tensor:
        """Return the network's outputs, float32, axes (rows, outputs)."""
        return self._view.opened(self._evidence.outputs, Grant.OUTPUTS)


class View:
    """The knowledge of one attacker; reading a value without its grant raises an error.

    Args:
        threat: the attacker and its grants.
        classes: number of classes, which is public; 1 for numeric labels.
        holdings: all values that the grants may give access to.

    Besides the groups of rows, a view has the attributes of `Holdings`. Attributes that are
    functions from which models come return copies or new models.
    """

    prior = _Opened[Tensor](Grant.PRIOR)
    bottom = _Opened[Maker](Grant.BOTTOM)
    new_bottom = _Opened[Maker](Grant.BOTTOM_RECIPE)
    new_top = _Opened[TopMaker](Grant.TOP_RECIPE)
    top = _Opened[Maker](Grant.TOP)
    merge = _Opened[Merge](Grant.TOP)
    others_bottom = _Opened[Maker](Grant.OTHERS_BOTTOM)
    others_top = _Opened[Maker](Grant.OTHERS_TOP)
    snapshots = _Opened[Sequence[Maker]](Grant.SNAPSHOTS)
    shape = _Opened[tuple[int, ...]](Grant.BOTTOM_RECIPE, Grant.OTHERS_BOTTOM)
    told = _Opened[Any](Grant.PROTOCOL)
    middle = _Opened[Maker](Grant.MIDDLE)

    def __init__(self, threat: ThreatModel, classes: int, holdings: Holdings) -> None:
        self.threat = threat
        self.classes = classes
        self._holdings = holdings

    def only(self, grants: Iterable[Grant]) -> View:
        """Return the same view with fewer grants: those grants that an attack declares in `needs`.

        Raises:
            NotGrantedError: the threat model does not grant a value that the attack needs.
        """
        wanted = frozenset(grants)
        for grant in Grant:
            if grant in wanted:
                self.require(grant)
        colluding = self.threat.colluding if Grant.PARTNERS in wanted else ()
        threat = replace(self.threat, grants=wanted, colluding=colluding)
        return View(threat, self.classes, self._holdings)

    def under(self, threat: ThreatModel) -> View:
        """Return a view of the same holdings under another threat model, with its grants."""
        return View(threat, self.classes, self._holdings)

    def instead(self, **held: Any) -> View:
        """Return the view with some holdings replaced, for example by averaged cuts."""
        return View(self.threat, self.classes, replace(self._holdings, **held))

    def with_cuts(self, cuts: Mapping[str, Tensor]) -> View:
        """Return the view with the cuts of some groups replaced; `cuts` maps groups to new cuts."""
        groups = {name: (getattr(self._holdings, name), values) for name, values in cuts.items()}
        return self.instead(**{name: replace(of, cuts=new) for name, (of, new) in groups.items()})

    @property
    def targets(self) -> GrantedRows:
        """Return the target rows; no view gives access to the values that the attack infers."""
        return GrantedRows(self, self._holdings.targets)

    @property
    def leaked(self) -> GrantedRows:
        """Return the rows whose labels, attribute or columns the attacker knows."""
        held = self.opened(self._holdings.leaked, *_GROUPS["leaked"])
        return GrantedRows(self, held, leaked=True)

    @property
    def unlabelled(self) -> GrantedRows:
        """Return further rows without labels, which may be the targets themselves."""
        return GrantedRows(self, self.opened(self._holdings.unlabelled, *_GROUPS["unlabelled"]))

    def withholding(self, hidden: Tensor) -> View:
        """Return a view in which some leaked rows lose their labels and become the last targets.

        An attack uses this view to validate its options on rows whose labels it knows.

        Args:
            hidden: mask of the leaked rows whose labels are withheld, bool, axes (leaked,).
        """
        targets, leaked = self._holdings.targets, self.leaked._evidence
        rows, order = targets.rows, torch.cat([hidden.nonzero()[:, 0], (~hidden).nonzero()[:, 0]])
        place = torch.arange(rows + leaked.rows)
        place[rows + order] = torch.arange(rows, rows + leaked.rows)
        exchanges = self._holdings.exchanges
        if exchanges is not None:
            exchanges = [replace(one, rows=place[one.rows]) for one in exchanges]
        return self.instead(
            targets=targets.beside(replace(leaked.of(hidden), labels=None)),
            leaked=leaked.of(~hidden),
            exchanges=exchanges,
        )

    def asking(self) -> View:
        """Return a view whose targets are the unlabelled rows."""
        return self.instead(targets=self.unlabelled._evidence)

    @property
    def exchanges(self) -> Sequence[RecordedExchange]:
        """Return the recorded training exchanges; cuts in them need the separate grant EPOCHS."""
        held = self.opened(self._holdings.exchanges, Grant.GRADIENTS)
        return [replace(one, cuts=partial(self._cuts_of, one)) for one in held]

    @property
    def transcript(self) -> Transcript[RecordedExchange]:
        """Return the recorded training as a transcript of the targets and then the leaked rows."""
        leaked = 0 if self._holdings.leaked is None else self._holdings.leaked.rows
        return Transcript(self.targets.rows + leaked, self.exchanges)

    @property
    def partners(self) -> list[View]:
        """Return the views of colluding parties, with the same groups of rows."""
        partners = self.opened(self._holdings.partners, Grant.PARTNERS)
        return [one.only(self.threat.grants & one.threat.grants) for one in partners]

    def opened(self, held: Held | None, *any_of: Grant) -> Held:
        """Return a value if the view has one of the grants that give access to it.

        Raises:
            NotGrantedError: the view has none of these grants, or the case does not contain the
                value.
        """
        self.require(*any_of)
        if held is None:
            raise NotGrantedError(f"this case does not contain {any_of[0]}", want=any_of[0].name)
        return held

    def require(self, *any_of: Grant) -> None:
        """Refuse an attacker that has none of these grants.

        Raises:
            NotGrantedError: the attacker has none of these grants; the error lists the grants that
                it has.
        """
        if self.threat.grants.isdisjoint(any_of):
            raise NotGrantedError(
                f"this attacker was not granted {' or '.join(any_of)}",
                where=f"a {self.threat.who} in the {self.threat.phase} phase",
                got=", ".join(one.name for one in Grant if one in self.threat.grants),
                want=" or ".join(one.name for one in any_of),
            )

    def _cuts_of(self, one: RecordedExchange) -> Tensor:
        self.require(Grant.EPOCHS)
        return one.cuts()

    def __repr__(self) -> str:
        return f"View({self.threat.who}, {self.threat.phase} phase)"


def groups_of(needs: Iterable[Grant]) -> list[str]:
    """Return the names of the groups of rows that an attack with these grants in `needs` reads.

    >>> groups_of({Grant.CUTS, Grant.LEAKED})
    ['targets', 'leaked']
    """
    asked = set(needs)
    return ["targets", *(name for name in ("leaked", "unlabelled") if asked & {*_GROUPS[name]})]
