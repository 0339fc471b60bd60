"""Privacy guarantees of mechanisms in checkable terms, and rules for adding epsilons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from vfl.core.errors import PrivacyError

#: The unit in which two neighbouring data sets differ: one label, one record or one client.
Unit = Literal["", "label", "record", "client"]
#: Relation of two neighbouring data sets: they differ by the value or by the presence of a record.
Relation = Literal["", "replace", "add or remove"]
#: Adversaries, from the strongest to the weakest.
Adversary = Literal["partner", "outsider with the model", "outsider with predictions"]
#: The span that one epsilon covers: one exchange of messages, one epoch or the whole training.
Span = Literal["exchange", "epoch", "training"]

#: Removal of a record when the number of rows is public: the record's contribution becomes 0
#: (zero-out, Kairouz et al. 2021). All other records keep their positions in batches of the same
#: size, so float32 rounds their values in the same way.
EMPTY_PLACE = "a removed record leaves an empty place in the table and in its batch"

UNITS, RELATIONS, ADVERSARIES, SPANS = map(get_args, (Unit, Relation, Adversary, Span))


@dataclass(frozen=True, slots=True)
class PrivacyStatement:
    """The privacy guarantee of a mechanism, in terms that readers can check.

    Attributes:
        protects: the protected data: "labels", "inputs", "records" (a row's inputs and label) or
            "model".
        against: the attacker against whom the mechanism protects, in one sentence.
        epsilon, delta: parameters of differential privacy for one `unit`; None without a guarantee.
        unit: "label", "record" or "client"; empty without a guarantee.
        per: the span that one epsilon covers: one "exchange" of messages, one "epoch" or the whole
            "training".
        relation: "replace" or "add or remove"; empty without a guarantee.
        adversary: the strongest adversary that the guarantee covers; a "partner" sees messages
            about single rows, while an "outsider" sees only the results of a training.
        accountant: accountant that computed the epsilon; empty without a guarantee.
        assumes: assumptions of the guarantee, each as a clause.
        training_only: whether the guarantee covers only messages of the training; later queries are
            then unprotected, even queries about training rows.
    """

    protects: str
    against: str
    epsilon: float | None = None
    delta: float | None = None
    unit: Unit = ""
    per: Span = "training"
    relation: Relation = ""
    adversary: Adversary = "partner"
    accountant: str = ""
    assumes: tuple[str, ...] = ()
    training_only: bool = False

    def __str__(self) -> str:
        text = f"{self.protects} against {self.against}"
        if self.epsilon is None:
            return f"{text} (no epsilon)"
        delta = f", delta {self.delta:g}" if self.delta else ""
        text += f": epsilon {self.epsilon:.4g}{delta} for one {self.unit} in one {self.per}"
        text += f" ({self.relation}; adversary: {self.adversary}; accountant: {self.accountant})"
        return f"{text}, if {'; '.join(self.assumes)}" if self.assumes else text

    def as_dict(self) -> dict[str, Any]:
        """Return the statement as a dictionary for JSON.

        The dictionary's entry `text` states the guarantee in words.
        """
        return asdict(self) | {"assumes": list(self.assumes), "text": str(self)}

    @property
    def kind(self) -> tuple[str, ...]:
        """Properties that two statements must share before their epsilons may be added."""
        return self.protects, self.unit, self.per, self.relation, self.adversary


def added(statements: Iterable[PrivacyStatement]) -> PrivacyStatement:
    """Return the joint guarantee of several mechanisms, by basic composition.

    By Dwork and Roth 2014, theorem 3.16, the joint epsilon is the sum of the epsilons, and the
    joint delta the sum of the deltas.

    >>> one = PrivacyStatement("labels", "everybody", 1.0, 0.0, "label", relation="replace")
    >>> added([one, one]).epsilon
    2.0

    Raises:
        PrivacyError: two statements differ in the protected data, unit, span, relation or
            adversary; or one has no epsilon; or there are no statements.
    """
    listed = list(statements)
    kinds = sorted({", ".join(filter(None, one.kind)) for one in listed})
    if len(kinds) != 1 or any(one.epsilon is None for one in listed):
        raise PrivacyError(
            "only epsilons of the same kind can be added",
            got="; ".join(kinds) or "no statement",
            want="statements with an epsilon of the same data, unit, span, relation and adversary",
            fix="compare them side by side",
        )
    epsilon = sum(one.epsilon or 0.0 for one in listed)
    assumes = tuple(dict.fromkeys(clause for one in listed for clause in one.assumes))
    accountant = listed[0].accountant if len(listed) == 1 else "basic composition"
    delta = sum(one.delta or 0.0 for one in listed)
    return replace(listed[0], epsilon=epsilon, delta=delta, accountant=accountant, assumes=assumes)
