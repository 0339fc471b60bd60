"""`model = "scorecard"`: each bin of a column gives points, in place of bottom and top models."""

from __future__ import annotations

from typing import ClassVar, Literal

from vfl.config.toml import Settings
from vfl.core.errors import ExposedCutError
from vfl.core.registry import require_choice, require_range
from vfl.mpc.secure.ends import Place
from vfl.session.secure_mode import Agreed, OwnRows
from vfl.session.terms import Terms
from vfl.trees.cells import CellsMode
from vfl.trees.newton import MOST_HALVINGS
from vfl.trees.scorecard import shared
from vfl.trees.scorecard.ends import FeatureEnd, LabelEnd
from vfl.trees.scorecard.points import Scale

_MOST_FINE, _MOST_BINS, _MOST = 256, 50, 1e9
#: Largest number of Newton steps of one regression.
_MOST_STEPS = 50


class Scorecard(CellsMode):
    """A scorecard over the columns of all parties (Siddiqi 2006).

    Each party divides its columns into fine bins. The label party merges these bins by their
    numbers of good and bad rows. The label party fits a logistic regression of the good class on
    weights of evidence, and converts the coefficients to points.

    Args:
        protect: with "order", the label party receives the bin of each cell. With "shared", it
            learns only sums over rows, and a helper (a party without data) takes part in each
            training.
        helper: name of a party without data, only with "shared"; it must not collude with any other
            party.
        bad: label of the bad class; by default the second label in sorted order.
        fine: largest number of fine bins of an ordered column.
        bins: largest number of merged bins of a column, without the bin of missing cells.
        min_share: smallest share of the training rows in a merged bin.
        floor: smallest number of rows of a bin for which a weight of evidence is computed; with
            "shared", smaller fine bins are joined before counting, until each has at least this
            many rows.
        monotone: "auto" merges the bins of each ordered column so that the bad rate only rises, or
            only falls, with the column.
        rising, falling: names of columns with which the bad rate may only rise (`rising`), or only
            fall (`falling`). All parties can read these names in the agreed terms of the training.
        min_iv: smallest information value of a column on the scorecard.
        max_vif: largest variance inflation factor that a column may have among the columns on the
            scorecard.
        max_p: largest p-value that a coefficient on the scorecard may have.
        l2: L2 penalty on coefficients, relative to the log-likelihood per row; a fit with a penalty
            has neither standard errors nor p-values.
        base_score, odds, double: `base_score` is the score at which there are `odds` good rows per
            bad row; `double` is the number of points that doubles these odds.
        reasons: form of a feature party's answer for a row: "party" is the sum of the points of its
            columns, "column" the points of each column.
        budget: largest number of weights of evidence that one party may receive in a training.

    >>> round(float(Scorecard(double=40).scale.score(0.0)), 4)
    374.2458
    """

    plain_ends = FeatureEnd, LabelEnd
    fits_once: ClassVar[bool] = True
    with_helper: ClassVar[str] = "scorecard:protect=shared,helper=NAME"
    announced_bytes: ClassVar[int] = 1 << 21
    facts_bytes: ClassVar[int] = 1 << 14
    facts: ClassVar[type[Settings]] = shared.Facts
    keeps: ClassVar[tuple[str, str]] = (
        "the bins of its columns, with weights of evidence and points",
        "the card, without names, edges and categories of other parties",
    )

    def __init__(
        self,
        protect: Literal["order", "shared"] = "order",
        helper: str = "helper",
        bad: str = "",
        fine: int = 32,
        bins: int = 6,
        min_share: float = 0.05,
        floor: int = 20,
        monotone: Literal["none", "auto"] = "none",
        rising: tuple[str, ...] = (),
        falling: tuple[str, ...] = (),
        min_iv: float = 0.02,
        max_vif: float = 10.0,
        max_p: float = 0.05,
        l2: float = 0.0,
        base_score: float = 600.0,
        odds: float = 50.0,
        double: float = 20.0,
        reasons: Literal["party", "column"] = "party",
        budget: int = 1000,
    ) -> None:
        require_choice("protect", protect, ("order", "shared"))
        require_range("fine", fine, 2, _MOST_FINE)
        require_range("bins", bins, 2, _MOST_BINS)
        require_range("min_share", min_share, 0, 0.5)
        require_range("floor", floor, 1, _MOST)
        require_choice("monotone", monotone, ("none", "auto"))
        require_range("min_iv", min_iv, 0, 100)
        require_range("max_vif", max_vif, 1, _MOST)
        require_range("max_p", max_p, 0, 1)
        require_range("l2", l2, 0, _MOST)
        require_range("base_score", base_score, 0, 10_000)
        require_range("odds", odds, 1e-6, 1e6)
        require_range("double", double, 1, 1000)
        require_choice("reasons", reasons, ("party", "column"))
        require_range("budget", budget, 1, 1_000_000)
        self.needs_keys, self.helper = protect == "shared", helper
        self.bad, self.bins, self.min_share, self.floor = bad, bins, min_share, floor
        self.max_bin, self.monotone = fine, monotone
        self.min_iv, self.max_vif, self.max_p, self.l2 = min_iv, max_vif, max_p, l2
        self.scale = Scale(base_score, odds, double)
        self.reasons, self.budget = reasons, budget
        self._signs = {**dict.fromkeys(rising, 1), **dict.fromkeys(falling, -1)}

    def refuse(self, agreed: Agreed) -> None:
        super().refuse(agreed)
        if self.needs_keys and not set(agreed.parties) - {agreed.label_party}:
            raise ExposedCutError(
                "the label party has all columns, so there is nothing to share",
                got="protect = shared",
                want="protect = order, or columns of another party",
            )

    def promise(self, agreed: Agreed) -> str:
        own = (
            "a feature party learns the weight of evidence of each merged bin of its columns, "
            f"except bins of fewer than {self.floor} rows"
        )
        if self.needs_keys:
            return (
                f"{agreed.label_party} learns how many good and bad rows are in each cell (joined "
                f"bins) of at least {self.floor} rows, correlations of columns and sums of the "
                "regression; it also learns each party's points for each row outside training; "
                f"{own}, and coefficients of its columns; {self.helper} learns cells "
                "and margins of columns and rows that it cannot identify, unless it colludes with "
                "another party"
            )
        return (
            f"{agreed.label_party} learns the bin of every training and validation cell, and the "
            f"points of other rows, but no name, edge or category; {own}"
        )

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Place) -> shared.TrainingEnd:
        if party == terms.label_party:
            return shared.LabelEnd(self, party, terms, rows, place)
        end = shared.HelperEnd if party == self.helper else shared.FeatureEnd
        return end(self, party, terms, rows, place)

    def most_sums(self, columns: int) -> int:
        """Return the largest number of requests for sums for a scorecard of so many columns."""
        return (1 + columns) * _MOST_STEPS * MOST_HALVINGS
