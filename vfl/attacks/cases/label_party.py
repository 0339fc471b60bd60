"""Cases of a label party that reconstructs columns, or infers an attribute, from cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.attacks.base import through
from vfl.attacks.cases.feature_party import Victim
from vfl.attacks.cases.recorded import Frames, in_two, last_cuts, messages_of
from vfl.attacks.cases.rows import (
    bottom_recipe,
    draw_columns,
    inputs_of,
    labels_of,
    top_recipe,
    untrained_merger,
)
from vfl.attacks.scoring import Case
from vfl.attacks.transcript import SentCuts
from vfl.attacks.view import (
    Evidence,
    Grant,
    GrantedRows,
    Holdings,
    Maker,
    ThreatModel,
    TopMaker,
    View,
)
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.core.errors import ConfigError, UserError
from vfl.core.frame import Kind
from vfl.core.seeds import scoped
from vfl.datasets import PartyData
from vfl.mpc.secure.sum import ring_of
from vfl.session import Terms

Weights = Mapping[str, Mapping[str, Tensor]]


class TrainedParts:
    """Models and weights of one trained network.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        weights: trained weights of all parties, as `LocalSession.weights` returns them.

    Attributes:
        experiment, data, weights: the arguments.
        lacking: grants of a label party for which the trained network has no values.
    """

    lacking: frozenset[Grant] = frozenset()

    def __init__(
        self, experiment: Experiment, data: Mapping[str, PartyData], weights: Weights
    ) -> None:
        self.experiment, self.data, self.weights = experiment, data, weights
        self._terms = Terms.of(experiment, "predict", experiment.name)

    def bottom(self, party: str) -> nn.Module:
        """Return a party's trained bottom; a feature party's has defense and codec layers."""
        asked, codec = self._terms.parties[party], compression.make(self._terms.codec)
        shape = tuple(inputs_of(self.data[party]).shape[1:])
        with scoped(0):  # initial weights, which the trained ones replace
            bottom = models.make_bottom(asked.bottom).build(shape, asked.width)
            made = nn.ModuleDict({"bottom": bottom})
            if party != self._terms.label_party:
                made["bottom"] = self._defense().wrap_bottom(bottom, asked.width)
                if adapter := codec.client_module(asked.width):
                    made["codec"] = adapter
        self._load(made, party)
        return nn.Sequential(*made.values()).eval()

    def new_bottom(self, party: str) -> nn.Module:
        """Return an untrained bottom with a feature party's architecture."""
        shape = tuple(inputs_of(self.data[party]).shape[1:])
        return bottom_recipe(self.experiment, party, shape)()

    def top(self) -> nn.Module:
        """Return the label party's trained top."""
        _, classes = labels_of(self.data[self._terms.label_party])
        width = self._terms.merged_width
        with scoped(0):
            top = top_recipe(self.experiment, classes)(width)
            defense = self._defense()
            defense.merged(self._terms.merged_blocks)
            made = nn.ModuleDict({"top": defense.wrap_top(top, width)})
        self._load(made, self._terms.label_party)
        return made["top"].eval()

    def merger(self) -> nn.Module:
        """Return the trained merger, which reads the cuts of all parties in the agreed order."""
        made = nn.ModuleDict({"merger": untrained_merger(self._terms)})
        self._load(made, self._terms.label_party)
        return made["merger"].eval()

    def merged_with(self, party: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that merges a feature party's cuts with the label party's own cuts."""
        order, merger = list(self._terms.parties), self.merger()
        if order.index(party) < order.index(self._terms.label_party):
            return merger
        return lambda victims, own: merger(own, victims)

    def outputs(self, queries: Frames, rows: Tensor) -> Tensor:
        """Return the network's outputs for rows whose cuts were recorded, axes (rows, classes).

        Args:
            queries: recorded query frames of every feature party; the function iterates over all
                frames once for each feature party, so an iterator is not enough.
            rows: positions among the aligned rows, int64.

        Raises:
            DataError: some rows have no recorded cut.
        """
        cuts = [self._cuts(name, queries, rows) for name in self._terms.parties]
        with torch.no_grad():
            merged = self.merger()(*cuts)
        return self._defense().logits(through(self.top(), merged), StepContext())

    def _cuts(self, party: str, queries: Frames, rows: Tensor) -> Tensor:
        """Return one party's cuts in the form that the merger reads."""
        if party == self._terms.label_party:
            return through(self.bottom(party), inputs_of(self.data[party])[rows])
        cuts, width = last_cuts(queries, party, rows), self._terms.parties[party].width
        with scoped(0):
            adapter = compression.make(self._terms.codec).server_module(width)
        if adapter is None:
            return cuts
        self._load(nn.ModuleDict({f"codec-{party}": adapter}), self._terms.label_party)
        return through(adapter, cuts)

    def _defense(self) -> defenses.Defense:
        return defenses.make(self._terms.defense)

    def _load(self, parts: nn.ModuleDict, party: str) -> None:
        """Load the weights of some modules from the weights of a party."""
        weights = self.weights[party].items()
        parts.load_state_dict({k: value for k, value in weights if k.split(".")[0] in parts})


#: Grants of a label party, whether it has columns or not. No real label party has the victim's
#: bottom; results with this grant are upper bounds.
COLUMNS = frozenset(
    {Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE}
    | {Grant.TOP, Grant.OTHERS_BOTTOM}
)
#: Further grants of a label party that has columns.
OWN_COLUMNS = frozenset({Grant.INPUTS, Grant.BOTTOM})


def columns_case(
    parts: TrainedParts,
    party: str,
    targets: tuple[Tensor, Evidence],
    leaked: tuple[Tensor, Evidence],
    threat: ThreatModel,
) -> Case:
    """Return the case of a label party that reconstructs the columns of a feature party.

    Args:
        parts: modules and weights of the trained network.
        party: the feature party that is attacked.
        targets: the targets: their positions among the aligned rows, int64, and the evidence that
            the label party received about them.
        leaked: the rows whose columns the attacker has, in the same form as `targets`.
        threat: the attacker and its grants; if the label party has columns, the function adds the
            grants that follow from them.
    """
    label = parts.data[parts.experiment.label.party]
    labels, classes = labels_of(label)
    inputs, (rows, sent), (known, sent_of_known) = inputs_of(parts.data[party]), targets, leaked
    own, shape = None if label.inputs is None else label.inputs[rows], tuple(inputs.shape[1:])
    holdings = Holdings(
        targets=replace(sent, inputs=own, labels=labels[rows]),
        leaked=replace(sent_of_known, inputs=inputs[known], labels=labels[known]),
        bottom=None if own is None else lambda: parts.bottom(label.name),
        new_bottom=lambda: parts.new_bottom(party),
        top=parts.top,
        merge=None if own is None else parts.merged_with(party),
        others_bottom=lambda: parts.bottom(party),
        shape=shape,
    )
    if own is not None:
        threat = replace(threat, grants=threat.grants | OWN_COLUMNS)
    threat = replace(threat, grants=threat.grants - parts.lacking)
    return Case(View(threat, classes, holdings), labels[rows], inputs[rows])


#: Grants of a label party at inference; and of a label party that has recorded the training.
RECEIVING = COLUMNS | {Grant.OUTPUTS, Grant.QUERIES}
RECALLING = COLUMNS | {Grant.EPOCHS}


def received_case(
    parts: TrainedParts,
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    again: Callable[[Tensor], Sequence[SentCuts]] | None = None,
) -> Case:
    """Return the case of a label party that reconstructs test rows from received query cuts.

    The leaked rows are validation rows. The last recorded cuts of leaked rows and of targets come
    from the same weights, unless the training restored the weights of an earlier epoch at its end.

    Args:
        parts: models and weights of the trained network.
        frames: frames of the validation and test queries; see `decoded`.
        party: the attacked feature party.
        leaks: number of validation rows whose columns the attacker has.
        draw: generator from which the leaked rows are drawn.
        again: function that returns the messages of repeated queries for given aligned rows, such
            as `Victim.asked_again`; None means no repeated queries.

    Raises:
        TooFewRowsError: there are fewer validation rows than `leaks`.
        DataError: the cuts of some rows were not recorded.
    """
    split = parts.data[parts.experiment.label.party].split
    validation, targets = torch.from_numpy(split.validation), torch.from_numpy(split.test)
    leaked = draw_columns(validation, leaks, draw, "validation")[:leaks]
    queries = [(frame, values) for frame, values in frames if frame.kind is Kind.QUERY]
    cuts = last_cuts(queries, party, torch.cat([targets, leaked]))
    first, second = Evidence(cuts=cuts[: len(targets)]), Evidence(cuts=cuts[len(targets) :])
    first = replace(first, outputs=parts.outputs(queries, targets))
    grants = RECEIVING
    if again is None:
        grants -= {Grant.QUERIES}
    else:
        first = replace(first, sent=lambda: again(targets))
        second = replace(second, sent=lambda: again(leaked))
    threat = ThreatModel("label party", "inference", grants)
    return columns_case(parts, party, (targets, first), (leaked, second), threat)


def recalled_case(
    parts: TrainedParts, frames: Frames, party: str, leaks: int, draw: torch.Generator
) -> Case:
    """Return the case of a label party that reconstructs training rows from training messages.

    The arguments are those of `received_case`, except that `frames` are frames of the training, and
    the leaked rows are training rows.

    Raises:
        TooFewRowsError: there are fewer training rows than `leaks`.
        DataError: the cuts of some rows were not recorded.
    """
    train = torch.from_numpy(parts.data[parts.experiment.label.party].split.train)
    order = draw_columns(train, leaks, draw, "training")
    trained = [(frame, values) for frame, values in frames if frame.phase == "train"]
    last_cuts(trained, party, order)  # raises if a row has no cut
    up = [one for of, one in messages_of(trained, party, order) if of.kind is Kind.CUT]
    second, first = in_two(up, leaks, len(order) - leaks)
    threat = ThreatModel("label party", "training", RECALLING)
    return columns_case(parts, party, (order[leaks:], first), (order[:leaks], second), threat)


#: Grants of a U-shape's server, which has neither columns nor labels of the attacked rows.
SERVING = frozenset(
    {Grant.CUTS, Grant.AUXILIARY, Grant.MIDDLE, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


def served_case(received: Case, middle: Maker, new_top: TopMaker) -> Case:
    """Return the case of a U-shape's server that has a few complete rows of the same kind.

    Args:
        received: case of `received_case`, with the leaked rows and the cuts.
        middle: function that returns a copy of the server's layers.
        new_top: function that returns untrained last layers for the outputs of `middle`.
    """
    threat = ThreatModel("label party", "inference", SERVING)
    view = received.view.instead(middle=middle, new_top=new_top)
    return replace(received, view=view.under(threat))


#: Grants of a label party that receives sums of cuts, and colludes with some of the senders.
SUMMING = COLUMNS | {Grant.PARTNERS}
_PARTNER = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})


def summed_case(
    parts: TrainedParts, party: str, partners: Sequence[str], leaks: int, draw: torch.Generator
) -> Case:
    """Return the case of a label party that reconstructs test rows from sums of cuts.

    Args:
        parts: models and weights of a network that was trained with ``secure = "sum"``.
        party: the feature party that is attacked.
        partners: feature parties that give the label party their cuts, which it subtracts; may be
            empty.
        leaks: number of validation rows whose columns the attacker has.
        draw: generator from which the leaked rows are drawn.

    Raises:
        UserError: the label party receives each party's cut separately, so there is no sum from
            which to subtract.
        TooFewRowsError: there are fewer validation rows than `leaks`.
    """
    experiment, data = parts.experiment, parts.data
    ring = ring_of(experiment)
    if ring is None:
        raise UserError(
            "the label party sees every cut, so there is no sum to subtract a partner's cut from",
            where="secure",
            got=experiment.secure,
            want="sum",
        )
    split = data[experiment.label.party].split
    validation, test = torch.from_numpy(split.validation), torch.from_numpy(split.test)
    groups = test, draw_columns(validation, leaks, draw, "validation")[:leaks]
    everybody = experiment.feature_parties

    def encoded(name: str, rows: Tensor) -> bytes:
        """Return a party's cuts as encoded for the sum; its masks are left out, as they cancel."""
        victim = Victim(experiment, data, name, parts.weights[name])
        return ring.encode(victim.cuts(rows), name, 0).tobytes()

    terms = {name: [encoded(name, rows) for rows in groups] for name in everybody}
    width = experiment.parties[party].width

    def summed(group: int, *names: str) -> Evidence:
        """Return the decoded sum of some parties' cuts for one group of rows."""
        masked = [terms[name][group] for name in names]
        return Evidence(cuts=ring.decode(masked, len(groups[group]), width))

    grants = SUMMING if partners else COLUMNS
    threat = ThreatModel("label party", "inference", grants, colluding=tuple(partners))
    targets, leaked = ((rows, summed(of, *everybody)) for of, rows in enumerate(groups))
    case = columns_case(parts, party, targets, leaked, threat)
    partner = ThreatModel("feature party", "inference", _PARTNER)
    held = [Holdings(summed(0, name), summed(1, name)) for name in partners]
    views = [View(partner, case.view.classes, one) for one in held]
    return replace(case, view=case.view.instead(partners=views))


#: Grants of a label party that has the attribute of a few rows.
ATTRIBUTE = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})
#: Grants that the case also gets if `received` has them.
REPEATED = frozenset({Grant.EPOCHS, Grant.QUERIES})


def require_column(columns: int, column: int | None) -> None:
    """Refuse a column number that the victim does not have.

    Raises:
        ConfigError: the column does not exist; the error states the range.
    """
    if column is not None and column >= columns:
        raise ConfigError(
            "the victim does not have this column",
            where="grid.attribute",
            got=str(column),
            want=f"0 to {columns - 1}",
        )


def attribute_case(received: Case, known: Tensor, column: int | None = None) -> Case:
    """Return the case of a label party that infers whether a row's column exceeds its mean.

    Args:
        received: case of `received_case` or `recalled_case`, with the rows and cuts.
        known: the victim's training rows, axes (rows, ...), from which the mean is computed.
        column: position of the attacked column in a row, from 0. None selects the column whose mean
            divides the training rows most evenly; among equal ones, the first.

    Raises:
        ConfigError: the victim does not have this column.
    """
    flat, view = known.flatten(1), received.view
    assert received.inputs is not None
    require_column(flat.shape[1], column)
    mean = flat.mean(0)
    if column is None:
        column = int(((flat > mean).double().mean(0) - 0.5).abs().argmin())

    def values(rows: Tensor) -> Tensor:
        return (rows.flatten(1)[:, column] > mean[column]).long()

    repeated = view.threat.grants & REPEATED

    def seen(rows: GrantedRows, labels: Tensor | None = None) -> Evidence:
        return Evidence(cuts=rows.cuts, labels=labels, sent=lambda: rows.sent)

    holdings = Holdings(seen(view.targets), seen(view.leaked, values(view.leaked.inputs)))
    threat = ThreatModel("label party", view.threat.phase, ATTRIBUTE | repeated)
    return Case(View(threat, 2, holdings), values(received.inputs))
