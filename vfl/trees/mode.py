"""`model = "trees"`: gradient boosting, in place of bottom models, cuts and a top model.

An epoch grows the trees of one boosting round on all training rows. So `train.epochs` is XGBoost's
`n_estimators`, and `train.patience` with `train.keep = "best"` are XGBoost's early stopping. All
other parameters are options of this model, with XGBoost's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from vfl.config.toml import Settings
from vfl.core.errors import BadOptionError, ExposedCutError
from vfl.core.registry import require_choice, require_range
from vfl.privacy import PrivacyStatement
from vfl.session.secure_mode import Agreed, OwnRows, WholeNetwork
from vfl.session.terms import Terms
from vfl.trees.bins import MAX_BINS
from vfl.trees.boosting import Boosting
from vfl.trees.cells import CellsMode
from vfl.trees.ends import FeatureEnd, LabelEnd
from vfl.trees.grow import Growth
from vfl.trees.objectives import Binary, Classes, Objective, Poisson, Squared
from vfl.trees.shared import Facts, HelperEnd, SharedFeatureEnd, SharedLabelEnd

_MOST_DEPTH, _MOST_LEAVES, _MOST = 64, 1 << 16, 1e9


class Trees(CellsMode):
    """Gradient-boosted trees over the columns of all parties (Chen and Guestrin 2016).

    Args:
        protect: "order": the label party receives the bin number of every cell (Tian et al. 2020).
            "shared": the label party receives sums of gradients over bins, which feature parties
            and a helper compute from additive shares.
        nodes: for "shared". "known": feature parties learn which rows are in which node, as in
            SecureBoost (Cheng et al. 2021), and so does the helper for rows that it cannot
            identify. "hidden": feature parties do not learn nodes, and the helper receives a share
            of every row for each node.
        helper: with "shared": name of a party without data; it must not collude with any other
            party.
        epsilon: epsilon of the randomised response on the bin of each training and validation cell
            of a feature party. For a row, the epsilons of all columns of that party add up. Answers
            about test rows, predicted rows and served rows use the true cells. None means no
            randomised response.
        objective: loss function: "auto" is cross-entropy for classes and squared error for numeric
            labels; "poisson" is for counts.
        learning_rate: factor by which each leaf value is multiplied.
        max_depth: largest number of levels of splits in a tree; 0 sets no limit.
        max_leaves: largest number of leaves of a tree; 0 sets no limit.
        grow_policy: "depthwise" splits level by level, "lossguide" splits the node with the largest
            gain first.
        max_bin: largest number of bins of an ordered column.
        reg_lambda, reg_alpha: L2 and L1 penalty of leaf weights.
        gamma: smallest gain that a split must have.
        min_child_weight: smallest sum of second derivatives that each child node of a split must
            have.
        max_delta_step: largest absolute leaf weight, before multiplication by `learning_rate`; 0
            sets no limit.
        subsample: share of the training rows on which each tree is grown.
        colsample_bytree: share of the columns that each tree may split on.
        own_rounds: number of boosting rounds, from the first one, whose trees split only on the
            label party's columns. Later splits on other parties' columns then disclose only what
            these rounds leave unexplained (the complete mode of Cheng et al. 2021).
        rising, falling: names of columns with which the prediction may only rise (`rising`), or
            only fall (`falling`). All parties can read these names in the agreed terms of the
            training.

    >>> Trees(max_depth=3).boosting((), seed=1).growth.max_depth
    3
    """

    plain_ends = FeatureEnd, LabelEnd
    with_helper: ClassVar[str] = "trees:protect=shared,helper=NAME"
    sized: ClassVar[bool] = False
    instead: ClassVar[Mapping[str, str]] = {
        "train.learning_rate": "model = 'trees:learning_rate=0.1'",
    }
    takes_noisy_labels: ClassVar[bool] = True
    explains_columns: ClassVar[bool] = True
    exports: ClassVar[Mapping[str, str]] = {"xgboost": "vfl.trees.export:export_forest"}
    announced_bytes: ClassVar[int] = 1 << 21
    facts_bytes: ClassVar[int] = 1 << 15
    facts: ClassVar[type[Settings]] = Facts
    keeps: ClassVar[tuple[str, str]] = (
        "the splits on its columns",
        "all trees, without the thresholds of other parties",
    )

    def __init__(
        self,
        protect: Literal["order", "shared"] = "order",
        nodes: Literal["known", "hidden"] = "known",
        helper: str = "helper",
        epsilon: float | None = None,
        objective: Literal["auto", "poisson"] = "auto",
        learning_rate: float = 0.3,
        max_depth: int = 6,
        max_leaves: int = 0,
        grow_policy: Literal["depthwise", "lossguide"] = "depthwise",
        max_bin: int = 255,
        reg_lambda: float = 1.0,
        reg_alpha: float = 0.0,
        gamma: float = 0.0,
        min_child_weight: float = 1.0,
        max_delta_step: float | None = None,
        subsample: float = 1.0,
        colsample_bytree: float = 1.0,
        own_rounds: int = 0,
        rising: tuple[str, ...] = (),
        falling: tuple[str, ...] = (),
    ) -> None:
        require_choice("protect", protect, ("order", "shared"))
        require_choice("nodes", nodes, ("known", "hidden"))
        require_choice("objective", objective, ("auto", "poisson"))
        require_choice("grow_policy", grow_policy, ("depthwise", "lossguide"))
        if epsilon is not None:
            require_range("epsilon", epsilon, 1e-3, 100)
        require_range("learning_rate", learning_rate, 1e-6, 10)
        require_range("max_depth", max_depth, 0, _MOST_DEPTH)
        require_range("max_leaves", max_leaves, 0, _MOST_LEAVES)
        if not max_depth and not max_leaves:
            raise BadOptionError(
                "a tree without a bound grows until every row has its own leaf",
                got="max_depth = 0, max_leaves = 0",
                want="a bound on depth or on leaves",
            )
        require_range("max_bin", max_bin, 2, MAX_BINS)
        for name, value in (
            ("reg_lambda", reg_lambda),
            ("reg_alpha", reg_alpha),
            ("gamma", gamma),
            ("min_child_weight", min_child_weight),
            ("max_delta_step", max_delta_step or 0.0),
        ):
            require_range(name, value, 0, _MOST)
        require_range("subsample", subsample, 1e-6, 1)
        require_range("colsample_bytree", colsample_bytree, 1e-6, 1)
        require_range("own_rounds", own_rounds, 0, _MOST)
        self.epsilon, self.max_bin, self._objective = epsilon, max_bin, objective
        self.needs_keys, self.nodes, self.helper = protect == "shared", nodes, helper
        self._own_rounds = own_rounds
        self._signs = {**dict.fromkeys(rising, 1), **dict.fromkeys(falling, -1)}
        usual = 0.7 if objective == "poisson" else 0.0
        self._delta = usual if max_delta_step is None else max_delta_step
        self._growth: dict[str, Any] = {
            "max_depth": max_depth,
            "max_leaves": max_leaves,
            "grow_policy": grow_policy,
            "learning_rate": learning_rate,
            "reg_lambda": reg_lambda,
            "reg_alpha": reg_alpha,
            "gamma": gamma,
            "min_child_weight": min_child_weight,
            "max_delta_step": self._delta,
        }
        self._drawn = subsample, colsample_bytree

    def refuse(self, agreed: Agreed) -> None:
        super().refuse(agreed)
        if self._own_rounds and agreed.label_party not in agreed.parties:
            raise ExposedCutError(
                "own_rounds needs columns of the label party, which has none",
                got=f"own_rounds = {self._own_rounds}",
                want="own_rounds = 0, or columns of the label party",
            )

    def promise(self, agreed: Agreed) -> str:
        own = "a feature party learns on which of its columns trees split, and at which bins"
        noise = ""
        if self.epsilon is not None:
            noise = f" after a randomised response of epsilon {self.epsilon:g} per cell"
        if self.needs_keys:
            known = self.nodes == "known"
            rows = " and which rows are in which node" if known else ""
            nodes = ", and which of these rows share a node" if known else ""
            return (
                f"{agreed.label_party} learns sums of gradients over bins, from which it can "
                f"compute bins{noise}, and whether rows go left or right at splits; {own}{rows}; "
                f"{self.helper} learns bins of columns and rows that it cannot identify{nodes}, "
                "unless it colludes with another party"
            )
        return (
            f"{agreed.label_party} learns the bin of every training and validation cell{noise}, "
            "and whether other rows go left or right at splits, but no name, edge or category; "
            f"{own}"
        )

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        """Return the guarantee for each training or validation cell of a feature party.

        For a row, the epsilons of all columns of a party add up.
        """
        if self.epsilon is None:
            return ()
        return (
            PrivacyStatement(
                protects="inputs",
                against="a label party that has the bin of a cell",
                epsilon=self.epsilon,
                unit="record",
                per="training",
                relation="replace",
                accountant="closed form",
                assumes=(
                    "epsilon is per cell: a row spends it for each of the party's columns",
                    "the row is a training or validation row, and is in no later evaluation or "
                    "prediction, because answers about such rows use the true cells",
                ),
                training_only=True,
            ),
        )

    def end(self, party: str, terms: Terms, rows: OwnRows, place: Any) -> WholeNetwork:
        if party == terms.label_party:
            return SharedLabelEnd(self, terms, rows, place)
        if party == self.helper:
            return HelperEnd(self, terms, rows, place)
        return SharedFeatureEnd(self, party, terms, rows, place)

    # Settings that the implementations of the parties read.

    def boosting(self, signs: Sequence[int], seed: int, own_columns: int = 0) -> Boosting:
        """Return the settings of boosting, with the monotone constraints of all columns."""
        growth = Growth(monotone=tuple(signs) if any(signs) else (), **self._growth)
        return Boosting(growth, *self._drawn, seed, self._own_rounds, own_columns)

    def objective_of(self, classes: int) -> Objective:
        """Return the objective for labels with this number of classes; 0 means numbers.

        Raises:
            BadOptionError: the labels are classes, but the objective needs counts.
        """
        if self._objective == "poisson":
            if classes:
                raise BadOptionError(
                    "the Poisson objective needs counts, not classes",
                    got="objective=poisson",
                    want="label.task = 'regression'",
                )
            return Poisson(max_delta_step=self._delta)
        if not classes:
            return Squared()
        return Binary() if classes == 2 else Classes(classes)
