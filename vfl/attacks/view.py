"""What an attacker sees: the granted things and no others.

Models come as makers, so that an attack may change its copy. Truth about the target rows is never
here: it stays with whoever scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from vfl.attacks.evidence import Evidence, Heard, Holdings, Maker, Merge, Sent, TopMaker
from vfl.attacks.threat import Grant, ThreatModel
from vfl.errors import NotGrantedError

#: Any of these grants opens a holding; rows are opened column by column as well.
_OPENS = {
    "leaked": (Grant.LEAKED, Grant.LEAKED_INPUTS, Grant.LEAKED_ATTRIBUTES),
    "unlabelled": (Grant.UNLABELLED,),
    "heard": (Grant.GRADIENTS,),
    "prior": (Grant.PRIOR,),
    "bottom": (Grant.BOTTOM,),
    "new_bottom": (Grant.BOTTOM_RECIPE,),
    "new_top": (Grant.TOP_RECIPE,),
    "top": (Grant.TOP,),
    "merge": (Grant.TOP,),
    "others_bottom": (Grant.OTHERS_BOTTOM,),
    "snapshots": (Grant.SNAPSHOTS,),
    "partners": (Grant.PARTNERS,),
    "shape": (Grant.BOTTOM_RECIPE, Grant.OTHERS_BOTTOM),
}


class Seen:
    """One group of rows as an attacker may see them; reaching for anything else raises.

    Args:
        view: whose grants count.
        evidence: what there is.
        leaked: whether these are the leaked rows, which have doors of their own.
    """

    def __init__(self, view: View, evidence: Evidence, leaked: bool = False) -> None:
        self._view = view
        self._evidence = evidence
        self._leaked = leaked

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._evidence.rows

    @property
    def inputs(self) -> Tensor:
        """The columns, float32, axes (rows, ...)."""
        leaked = (Grant.LEAKED_INPUTS,) if self._leaked else ()
        return self._column("inputs", Grant.INPUTS, *leaked)

    @property
    def cuts(self) -> Tensor:
        """What travelled, float32, axes (rows, width)."""
        return self._column("cuts", Grant.CUTS)

    @property
    def sent(self) -> Sequence[Sent]:
        """Every message that held cuts of these rows, over epochs or over queries."""
        self._view.require(Grant.EPOCHS, Grant.QUERIES)
        recorded: Callable[[], Sequence[Sent]] = there(self._evidence.sent, Grant.EPOCHS)
        return recorded()

    @property
    def labels(self) -> Tensor:
        """The classes (of leaked rows, or an attribute's), int64, axes (rows,)."""
        leaked = (Grant.LEAKED_ATTRIBUTES, Grant.LEAKED) if self._leaked else ()
        return self._column("labels", Grant.LABELS, *leaked)

    @property
    def before(self) -> Tensor | None:
        """What the bottom's last layer is given, axes (rows, features); None where not kept."""
        self._view.require(Grant.INPUTS)
        self._view.require(Grant.BOTTOM)
        kept = self._evidence.before
        return None if kept is None else kept()

    @property
    def outputs(self) -> Tensor:
        """What the network answered, float32, axes (rows, outputs)."""
        return self._column("outputs", Grant.OUTPUTS)

    def _column(self, name: str, *grants: Grant) -> Tensor:
        self._view.require(*grants)
        values: Tensor = there(getattr(self._evidence, name), grants[-1])
        return values


class View:
    """What one attacker may use; reaching for anything else raises.

    Args:
        threat: who it is and what it is granted.
        classes: how many classes there are, which is public.
        holdings: what there is to grant.
    """

    def __init__(self, threat: ThreatModel, classes: int, holdings: Holdings) -> None:
        self.threat = threat
        self.classes = classes
        self._holdings = holdings

    def only(self, grants: Iterable[Grant]) -> View:
        """The same view with fewer grants: an attack gets what it says it needs.

        Raises:
            NotGrantedError: it needs what the threat model does not grant.
        """
        wanted = frozenset(grants)
        for grant in Grant:
            if grant in wanted:
                self.require(grant)
        colluding = self.threat.colluding if Grant.PARTNERS in wanted else ()
        threat = replace(self.threat, grants=wanted, colluding=colluding)
        return View(threat, self.classes, self._holdings)

    def instead(self, **held: Any) -> View:
        """The same attacker with other holdings, by name, such as cuts it has averaged itself."""
        return View(self.threat, self.classes, replace(self._holdings, **held))

    def with_cuts(self, cuts: Mapping[str, Tensor]) -> View:
        """The same attacker with other cuts of some groups of rows, by the group's name."""
        groups = {name: (getattr(self._holdings, name), values) for name, values in cuts.items()}
        return self.instead(**{name: replace(of, cuts=new) for name, (of, new) in groups.items()})

    @property
    def targets(self) -> Seen:
        """The rows that are attacked; their labels are nobody's to see."""
        return Seen(self, self._holdings.targets)

    @property
    def leaked(self) -> Seen:
        """The rows with leaked labels, attributes or columns."""
        return Seen(self, self._held("leaked"), leaked=True)

    @property
    def unlabelled(self) -> Seen:
        """Further rows, which may be the targets themselves."""
        return Seen(self, self._held("unlabelled"))

    @property
    def heard(self) -> Sequence[Heard]:
        """The training, exchange by exchange; the cuts of each are a grant of their own."""
        heard: Sequence[Heard] = self._held("heard")
        return [replace(one, cuts=partial(self._told, one)) for one in heard]

    @property
    def prior(self) -> Tensor:
        """Share of each class, axes (classes,)."""
        prior: Tensor = self._held("prior")
        return prior

    def bottom(self) -> nn.Module:
        """A copy of the attacker's own trained bottom."""
        make: Maker = self._held("bottom")
        return make()

    def new_bottom(self) -> nn.Module:
        """An untrained bottom of the architecture in use."""
        make: Maker = self._held("new_bottom")
        return make()

    def new_top(self, width: int) -> nn.Module:
        """An untrained top of the architecture in use, for cuts of this width."""
        make: TopMaker = self._held("new_top")
        return make(width)

    def top(self) -> nn.Module:
        """A copy of the attacker's own trained top."""
        make: Maker = self._held("top")
        return make()

    @property
    def merge(self) -> Merge:
        """How the victim's cuts and the attacker's own meet before its top."""
        merge: Merge = self._held("merge")
        return merge

    def others_bottom(self) -> nn.Module:
        """A copy of the victim's trained bottom, which no real party has."""
        make: Maker = self._held("others_bottom")
        return make()

    @property
    def snapshots(self) -> Sequence[Maker]:
        """Each makes a copy of the attacker's own bottom as it was after an epoch, in order."""
        snapshots: Sequence[Maker] = self._held("snapshots")
        return snapshots

    @property
    def partners(self) -> list[View]:
        """What those who collude hold of the same groups of rows, as far as it is asked for."""
        partners: Sequence[View] = self._held("partners")
        return [one.only(self.threat.grants & one.threat.grants) for one in partners]

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of one of the victim's rows, which its architecture tells."""
        shape: tuple[int, ...] = self._held("shape")
        return shape

    def require(self, *any_of: Grant) -> None:
        """Refuse what none of these grants opens.

        Raises:
            NotGrantedError: with what was granted.
        """
        if self.threat.grants.isdisjoint(any_of):
            raise NotGrantedError(
                f"this attacker was not granted {' or '.join(any_of)}",
                where=f"a {self.threat.who} in the {self.threat.phase} phase",
                got=", ".join(one.name for one in Grant if one in self.threat.grants),
                want=" or ".join(one.name for one in any_of),
            )

    def _told(self, one: Heard) -> Tensor:
        self.require(Grant.EPOCHS)
        return one.cuts()

    def _held(self, name: str) -> Any:
        self.require(*_OPENS[name])
        return there(getattr(self._holdings, name), _OPENS[name][0])

    def __repr__(self) -> str:
        return f"View({self.threat.who}, {self.threat.phase} phase)"


def groups_of(needs: Iterable[Grant]) -> list[str]:
    """The groups of rows that an attack with these needs reads.

    >>> groups_of({Grant.CUTS, Grant.LEAKED})
    ['targets', 'leaked']
    """
    asked = set(needs)
    return ["targets", *(name for name in ("leaked", "unlabelled") if asked & {*_OPENS[name]})]


def there(found: Any, grant: Grant) -> Any:
    """What was granted, as far as there is any.

    Raises:
        NotGrantedError: there is none in this case.
    """
    if found is None:
        raise NotGrantedError(f"this case has nothing of {grant}", want=grant.name)
    return found
