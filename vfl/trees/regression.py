"""`model = "regression"`: a regression with standard errors, in place of bottom and top models.

The fit uses Newton's method on sums over all training rows (`vfl.trees.newton`); only the label
party learns these sums (`vfl.trees.sums`). A helper (a party without data) takes part in each
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError
from vfl.core.registry import require_choice, require_range
from vfl.mpc.secure.ends import Place
from vfl.session.secure_mode import Agreed, OwnRows
from vfl.session.terms import Terms
from vfl.trees.cells import CellsMode
from vfl.trees.newton import MOST_HALVINGS, Family, Penalty, Selection, family
from vfl.trees.regression_ends import Facts, FeatureEnd, LabelEnd, TrainingEnd

_FAMILIES = {"linear": "gaussian", "logistic": "binomial", "poisson": "poisson"}


class Regression(CellsMode):
    """A linear, logistic or Poisson regression on the columns of all parties, with standard errors.

    Args:
        family: "linear", "logistic" or "poisson"; "auto" is logistic for two classes and linear for
            numeric labels.
        helper: name of a party without data; it must not collude with any other party.
        l1, l2: weights of the elastic-net penalty; see `Penalty`. Standard errors require a fit
            without a penalty.
        select: "p", "aic" or "bic" selects columns step by step; see `Selection`.
        enter, leave: p-value limits for adding a column and for removing a column; see `Selection`.
        max_steps: largest number of Newton steps for one fit.

    >>> Regression(helper="notary").third_party("bank")
    'notary'
    """

    needs_keys: bool = True
    plain_ends = FeatureEnd, LabelEnd
    fits_once: ClassVar[bool] = True
    with_helper: ClassVar[str] = "regression:helper=NAME"
    announced_bytes: ClassVar[int] = 1 << 9
    facts_bytes: ClassVar[int] = 1 << 14
    facts: ClassVar[type[Settings]] = Facts
    keeps: ClassVar[tuple[str, str]] = (
        "the coefficients of its columns, with standard errors",
        "all coefficients, without the units of other parties' columns",
    )
    instead: ClassVar[Mapping[str, str]] = {"train.weight_decay": "model = 'regression:l2=0.01'"}

    def __init__(
        self,
        family: Literal["auto", "linear", "logistic", "poisson"] = "auto",
        helper: str = "helper",
        l1: float = 0.0,
        l2: float = 0.0,
        select: Literal["none", "p", "aic", "bic"] = "none",
        enter: float = 0.05,
        leave: float = 0.05,
        max_steps: int = 50,
    ) -> None:
        require_choice("family", family, ("auto", *_FAMILIES))
        require_choice("select", select, ("none", "p", "aic", "bic"))
        require_range("max_steps", max_steps, 1, 1000)
        require_range("enter", enter, 0, 1)
        require_range("leave", leave, enter, 1)
        self._family, self.helper, self.max_steps = family, helper, max_steps
        self.penalty = Penalty(l1, l2)
        self.selection = None if select == "none" else Selection(select, enter, leave)
        if self.penalty and self.selection is not None:
            raise BadOptionError(
                "column selection uses standard errors, which require a fit without a penalty",
                got=f"select={select}, l1={l1:g}, l2={l2:g}",
                want="either select or a penalty",
            )

    def promise(self, agreed: Agreed) -> str:
        return (
            f"{agreed.label_party} learns sums over rows, such as X^T X, and all coefficients of "
            "standardised columns; a feature party learns the coefficients of its own columns; "
            f"{self.helper} learns the margins of training rows that it cannot identify, unless it "
            f"colludes with another party; for each other row, {agreed.label_party} learns each "
            "party's part of the margin"
        )

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Place) -> TrainingEnd:
        return TrainingEnd(self, party, terms, rows, place)

    # Settings that the implementations of both kinds of party read.

    def most_sums(self, columns: int) -> int:
        """Return the largest number of requests for sums that a fit on this many columns needs."""
        fits = 1 if self.selection is None else 2 + 4 * columns
        return fits * self.max_steps * MOST_HALVINGS

    def family_of(self, classes: int) -> Family:
        """Return the family for labels with this number of classes; 0 means numbers.

        Raises:
            BadOptionError: the labels do not fit the family.
        """
        usual = "logistic" if classes else "linear"
        name = usual if self._family == "auto" else self._family
        if (name == "logistic") != (classes > 0) or classes not in (0, 2):
            raise BadOptionError(
                "the labels do not fit the regression's family",
                got=f"family={name}, {classes} classes" if classes else f"family={name}, numbers",
                want="two classes for 'logistic', numbers for 'linear' and 'poisson'",
                fix="label.task = 'regression' for numbers",
            )
        return family(_FAMILIES[name])
