"""Cases: attackers' data from a trained victim or a recorded training, with the true values.

Each function builds a `Case` from the experiment, the aligned rows, and either recorded messages or
trained weights. A case consists of the attacker's view under a threat model, and of the true
values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.attacks.active.base import ActiveAdversary
from vfl.attacks.base import OwnBottom, before_last, through
from vfl.attacks.scoring import Case, seeking
from vfl.attacks.transcript import RecordedExchange, SentCuts
from vfl.attacks.view import (
    Evidence,
    Grant,
    GrantedRows,
    Holdings,
    Maker,
    ThreatModel,
    TopMaker,
    TrainedBy,
    View,
)
from vfl.compression import StepContext
from vfl.config import Experiment
from vfl.config.run_folder import RunFolder
from vfl.config.validate import check_one_label_party
from vfl.core.errors import ConfigError, DataError, TooFewRowsError, UserError
from vfl.core.frame import Kind, Link
from vfl.core.seeds import Secret, scoped
from vfl.datasets import PartyData, Split
from vfl.mpc.secure.sum import ring_of
from vfl.session import PartyFolder, Terms, rules
from vfl.session.exchange import CutTerms, FeatureEnd, Own
from vfl.session.schedule import queries
from vfl.session.secure_mode import shared_bottom_error, shares_weights
from vfl.session.trace import Recorded, Replayed
from vfl.session.trace.replay import Decoder
from vfl.transport.link import local_pair


def draw_leak(labels: Tensor, k: int, draw: torch.Generator, classes: int | None = None) -> Tensor:
    """Draw k rows of each class; return positions, sorted by class, int64, axes (classes * k,).

    From the same generator state, a larger k first selects the rows that a smaller k selects, and
    then further rows. So, along a curve over k, leaked rows are added and never replaced.

    Args:
        labels: class numbers 0..C-1 of the rows that may leak, int64, axes (rows,).
        k: number of rows to draw from each class.
        draw: generator from which the rows are drawn.
        classes: number of classes; None takes the highest class number among these rows plus 1, and
            so misses higher classes without a row.

    Raises:
        TooFewRowsError: a class has fewer than k rows.

    >>> labels = torch.tensor([0, 1, 0, 1, 0])
    >>> draw_leak(labels, 2, torch.Generator().manual_seed(0)).shape
    torch.Size([4])
    """
    if classes is None:
        classes = 1 + int(labels.max()) if len(labels) else 1
    order = torch.randperm(len(labels), generator=draw)
    shuffled = labels[order]
    chosen = []
    for code in range(classes):
        found = order[shuffled == code][:k]
        if len(found) < k:
            raise TooFewRowsError(
                f"{k} labels of each class should leak, but a class has fewer rows",
                got=f"{len(found)} rows",
                fix="a smaller k, or more rows",
            )
        chosen.append(found)
    return torch.cat(chosen)


def top_recipe(experiment: Experiment, classes: int) -> TopMaker:
    """Return a function that makes untrained tops, as in the experiment, for given cut widths."""
    return lambda width: models.make_top(experiment.label.top).build(width, classes)


def bottom_recipe(experiment: Experiment, party: str, shape: tuple[int, ...]) -> Maker:
    """Return a function that makes untrained bottoms as a party's, for rows of the given axes."""
    asked = experiment.parties[party]
    return lambda: models.make_bottom(asked.bottom).build(shape, asked.width)


Frames = Iterable[tuple[Replayed, Tensor]]


def decoded(
    trace: Iterable[Recorded], terms: Terms, split: Split
) -> Iterator[tuple[Replayed, Tensor]]:
    """Yield each frame of an in-memory trace, with its rows and the values that were decoded.

    Args:
        trace: all cuts, gradients and queries of a session, in the order of sending.
        terms: terms that the parties of the session agreed on.
        split: the session's aligned rows.

    Raises:
        FrameError: the codec could not have made the bytes of a frame.
    """
    exchanges = {exchange.step: exchange for exchange in rules.schedule(terms, split)}
    decoders: dict[str, Decoder] = {}
    for one in trace:
        exchange = exchanges[one.step]
        frame = Replayed(
            one.party, one.direction, one.kind, one.step, one.payload,
            phase=exchange.phase, epoch=exchange.epoch, rows=exchange.rows,
        )  # fmt: skip
        if one.party not in decoders:
            decoders[one.party] = Decoder(terms, one.party, Path("the trace in memory"))
        yield frame, decoders[one.party].values(frame)


def recorded_exchanges(frames: Frames, party: str, rows: Tensor) -> list[RecordedExchange]:
    """Return, in order, the training exchanges on the connection of one feature party.

    Args:
        frames: frames of a session; the function ignores phases other than training.
        party: the feature party.
        rows: positions of the rows to keep among the aligned rows, int64. `RecordedExchange.rows`
            contains indices into this tensor. Exchanges leave out all rows that are not in it.
    """
    found: list[RecordedExchange] = []
    up: dict[int, SentCuts] = {}
    for frame, one in _messages(frames, party, rows):
        if frame.phase == "train" and frame.kind is Kind.CUT:
            up[one.step] = one
        elif frame.phase == "train":
            found.append(RecordedExchange.of(up.pop(one.step), one.cuts))
    return found


def last_cuts(frames: Frames, party: str, rows: Tensor) -> Tensor:
    """Return the last cut that a feature party sent for each row, axes (rows, width).

    Args:
        frames: frames in which to search, of any phases.
        party: the feature party.
        rows: positions among the aligned rows, int64.

    Raises:
        DataError: one of these rows has no recorded cut.
    """
    messages = _messages(frames, party, rows)
    found, missing = _latest((one for of, one in messages if of.direction == "up"), len(rows))
    if missing.any():
        raise DataError(
            f"not every row has a recorded cut of party '{party}'",
            got=f"no cut of {int(missing.sum())} of {len(rows)} rows",
            fix="set trace.phases to record the phase with these rows",
        )
    return found


def _messages(frames: Frames, party: str, rows: Tensor) -> Iterator[tuple[Replayed, SentCuts]]:
    """Yield the frames on a party's connection, each with its values for the selected rows."""
    index = torch.full((int(rows.max()) + 1,), -1)
    index[rows] = torch.arange(len(rows))
    for frame, values in frames:
        if frame.party == party:
            asked = torch.from_numpy(frame.rows)
            found = torch.where(
                asked < len(index), index[asked.clamp(max=len(index) - 1)], torch.tensor(-1)
            )
            kept = found >= 0
            yield frame, SentCuts(frame.step, frame.epoch, found[kept], values[kept])


def _latest(messages: Iterable[SentCuts], rows: int) -> tuple[Tensor, Tensor]:
    """Return each row's last cut, axes (rows, width), and a mask of rows without a cut."""
    found, missing = torch.empty(0), torch.ones(rows, dtype=torch.bool)
    for one in messages:
        if not len(found):
            found = torch.zeros(rows, one.cuts.shape[1])
        found[one.rows] = one.cuts
        missing[one.rows] = False
    return found, missing


def _in_two(messages: Sequence[SentCuts], first: int, second: int) -> tuple[Evidence, Evidence]:
    """Split messages into evidence about `first` and `second` rows, each with the last cuts.

    A schedule leaves out the last batch of an epoch if it has only one row. If a row has no cut for
    this reason, the evidence has messages but no last cuts.
    """
    cuts, missing = _latest(messages, first + second)

    def seen(start: int, stop: int) -> Evidence:
        def sent() -> list[SentCuts]:
            found = []
            for one in messages:
                kept = (one.rows >= start) & (one.rows < stop)
                found.append(SentCuts(one.step, one.epoch, one.rows[kept] - start, one.cuts[kept]))
            return found

        return Evidence(cuts=None if missing.any() else cuts[start:stop], sent=sent)

    return seen(0, first), seen(first, first + second)


Part = Literal["train", "validation", "test"]
#: Grants that a feature party can have at inference; an attack receives those that it needs.
INFERENCE = frozenset(
    {Grant.INPUTS, Grant.BOTTOM, Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED}
    | {Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Parts of the data split from which a case's groups of rows come, and who trained the network.

    Attributes:
        targets: part of the split (such as "test") whose rows are attacked.
        leaks: part of the split from which leaked labels are drawn.
        unlabelled: part of the split from which unlabelled rows come; by default, the targets
            themselves.
        trained_by: "owner" or "split": who trained the network, see `ThreatModel`.
    """

    targets: Part = "test"
    leaks: Part = "train"
    unlabelled: Part = "test"
    trained_by: TrainedBy = "split"


def labels_of(label: PartyData) -> tuple[Tensor, int]:
    """Return all rows' labels, axes (rows,), and the number of classes (1 for numeric labels)."""
    assert label.labels is not None, "a label party has some"
    return label.labels, 1 if label.classes is None else len(label.classes)


def codes_of(labels: Tensor, classes: int) -> Tensor:
    """Return class numbers for drawing leaked rows; for numeric labels, all numbers are equal."""
    return labels if classes > 1 else torch.zeros(len(labels), dtype=torch.int64)


def classes_of(label: PartyData) -> tuple[Tensor, int]:
    """Return the classes of all rows, int64, axes (rows,), and the number of classes.

    Raises:
        UserError: the labels are numeric, not classes.
    """
    if label.classes is None or label.labels is None:
        raise UserError("a regression has no classes to infer", where="label.task")
    return label.labels, len(label.classes)


def _inputs_of(data: PartyData) -> Tensor:
    assert data.inputs is not None
    return data.inputs


def _prior_of(label: PartyData) -> Tensor | None:
    """Return each class's share of the training rows, axes (classes,); None for numeric labels."""
    labels, classes = labels_of(label)
    if classes == 1:
        return None
    train = labels[torch.from_numpy(label.split.train)]
    return train.bincount(minlength=classes) / len(train)


def _with_leaks(grants: frozenset[Grant], k: int, classes: int) -> frozenset[Grant]:
    """Return the grants, without leaked labels or class shares if the case does not have them."""
    absent = {Grant.LEAKED: not k, Grant.PRIOR: classes == 1}
    return grants - {grant for grant, is_absent in absent.items() if is_absent}


class Victim:
    """A trained feature party that answers queries, and the labels that it must not learn.

    The attacker's untrained networks have the architectures in the experiment, without the layers
    that a defense adds; its trained bottom has these layers.

    Args:
        experiment: experiment of the training.
        data: aligned rows of every party; the label party's labels are the true values.
        party: the feature party that attacks, or that answers the label party's queries.
        weights: trained weights of this party.
        secret: secret of this party, from which the noise on queries is drawn. None derives a
            simulated secret from the seed of the experiment.

    Raises:
        UserError: the experiment has no such feature party.
        ConfigError: the experiment has several label parties, or a middle party.
        ExposedCutError: in this training, parties share the weights of the first layers, so no
            party has a bottom.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: Mapping[str, PartyData],
        party: str,
        weights: Mapping[str, Tensor],
        secret: Secret | None = None,
    ) -> None:
        check_one_label_party(experiment, "an attack on a run")
        label = data[experiment.label.party]
        if party not in experiment.feature_parties or data[party].inputs is None:
            known = ", ".join(experiment.feature_parties)
            raise UserError("no feature party has that name", got=party, want=known)
        self.labels, self.classes = labels_of(label)
        if shares_weights(experiment):
            raise shared_bottom_error(party)
        self.name, self._experiment, self._split = party, experiment, data[party].split
        self._inputs, self._prior = _inputs_of(data[party]), _prior_of(label)
        self._terms = Terms.of(experiment, "predict", experiment.name)
        self._secret = secret or Secret.of_simulation(experiment.seed, party)
        self._shape = tuple(self._inputs.shape[1:])
        self._half, self._own, self._there = self._trained(weights)
        self._evidence: dict[Part, Evidence] = {}

    @classmethod
    def of_run(cls, folder: RunFolder, data: Mapping[str, PartyData], party: str) -> Victim:
        """Return the party with its trained weights from a run folder.

        Args:
            folder: the run folder.
            data: each party's rows, as `vfl.training.run.load_data` returns them for the
                experiment.
            party: the feature party that attacks.

        Raises:
            RunFolderError: the run folder has no weights of this party; in a federation, only the
                party itself has its weights.
        """
        weights = PartyFolder(folder.party(party)).weights()
        return cls(folder.experiment(), data, party, weights)

    def case(
        self,
        k: int,
        draw: torch.Generator,
        setting: Setting | None = None,
        *,
        snapshots: Sequence[Mapping[str, Tensor]] = (),
        partners: Sequence[Victim] = (),
    ) -> Case:
        """Return the case of an attacker that has k leaked labels of each class.

        Args:
            k: number of leaked labels per class; with 0, the view grants no leaked labels.
            draw: generator from which the leaked rows are drawn.
            setting: parts of the split for targets, leaked rows and unlabelled rows.
            snapshots: the party's weights after each epoch, if the run stored them.
            partners: feature parties that share their data about the same rows with the attacker.

        Raises:
            TooFewRowsError: a class has fewer than k rows that may leak.
            UserError: leaked rows and targets come from the same part of the split.
        """
        setting, leak = setting or Setting(), draw.clone_state()
        if setting.leaks == setting.targets:
            raise UserError(
                "rows that the attacker already knows cannot be attacked", got=setting.leaks
            )
        grants = _with_leaks(INFERENCE, k, self.classes)
        grants |= {Grant.SNAPSHOTS} if snapshots else set()
        grants |= {Grant.PARTNERS} if partners else set()
        names, makers = tuple(one.name for one in partners), self._makers()
        threat = ThreatModel(
            "feature party", "inference", grants, "semi-honest", names, setting.trained_by
        )
        holdings = Holdings(
            targets=self._part(setting.targets),
            leaked=self._leak(k, draw, setting.leaks) if k else None,
            unlabelled=self._part(setting.unlabelled),
            prior=self._prior,
            bottom=makers.bottom,
            new_bottom=makers.new_bottom,
            new_top=makers.new_top,
            snapshots=[partial(self._own_bottom, weights) for weights in snapshots],
            partners=[one.case(k, leak.clone_state(), setting).view for one in partners],
        )
        targets = self._rows(setting.targets)
        return Case(View(threat, self.classes, holdings), self.labels[targets])

    def cuts(self, rows: Tensor) -> Tensor:
        """Return the cuts that the label party receives for these rows, axes (rows, width)."""
        codec = compression.make(self._terms.codec)
        codec.load_state_dict(self._half.codec.state_dict())
        found = []
        for step, part in enumerate(queries(rows.numpy())):
            self._half.send_query(self._inputs[torch.from_numpy(part)], step)
            payload = self._there.receive().payload
            width = self._half.wire_width
            found.append(codec.decode(payload, len(part), width, StepContext(step)).cut)
        return torch.cat(found)

    def asked_again(self, rows: Tensor, times: int, draw: torch.Generator) -> list[SentCuts]:
        """Return the cuts that the label party receives if queries are repeated in new row orders.

        Args:
            rows: positions among the aligned rows, int64; `SentCuts.rows` contains indices into
                this tensor.
            times: number of times that each row is queried.
            draw: generator from which the row orders are drawn.
        """
        found = []
        for time in range(1, times + 1):
            order = torch.randperm(len(rows), generator=draw)
            found.append(SentCuts(time, time, order, self.cuts(rows[order])))
        return found

    def _makers(self) -> Holdings:
        """Return holdings that contain only the functions that make models."""
        return Holdings(
            bottom=self._own_bottom,
            new_bottom=bottom_recipe(self._experiment, self.name, self._shape),
            new_top=top_recipe(self._experiment, self.classes),
        )

    def _leak(self, k: int, draw: torch.Generator, part: Part) -> Evidence:
        rows = self._rows(part)
        codes = codes_of(self.labels[rows], self.classes)
        leaked = rows[draw_leak(codes, k, draw, self.classes)]
        return Evidence(self._inputs[leaked], self.cuts(leaked), self.labels[leaked])

    def _part(self, part: Part) -> Evidence:
        """Return evidence about a part of the split, without labels; cached after one call."""
        if part not in self._evidence:
            rows = self._rows(part)
            inputs = self._inputs[rows]
            kept = cache(lambda: before_last(self._own_bottom(), inputs))
            self._evidence[part] = Evidence(inputs, self.cuts(rows), before=kept)
        return self._evidence[part]

    def _trained(self, weights: Mapping[str, Tensor]) -> tuple[FeatureEnd, OwnBottom, Link]:
        here, there = local_pair()
        terms, name = self._terms, self.name
        with scoped(self._secret.number("init")):
            width = terms.parties[name].width
            core = models.make_bottom(terms.parties[name].bottom).build(self._shape, width)
            codec, defense = compression.make(terms.codec), defenses.make(terms.defense)
            agreed = CutTerms(name, width, codec, defense)
            half = FeatureEnd(agreed, core, Own(self._secret), there)
        half.load_state_dict(weights)
        return half, OwnBottom(half.model.values(), core), here

    def _own_bottom(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return a copy of the bottom, trained or of a snapshot, with defense and codec layers."""
        return copy.deepcopy(self._own) if weights is None else self._trained(weights)[1]

    def _rows(self, part: Part) -> Tensor:
        return torch.from_numpy(getattr(self._split, part))


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
        shape = tuple(_inputs_of(self.data[party]).shape[1:])
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
        shape = tuple(_inputs_of(self.data[party]).shape[1:])
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
        made = nn.ModuleDict({"merger": _merger(self._terms)})
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
            return through(self.bottom(party), _inputs_of(self.data[party])[rows])
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
    inputs, (rows, sent), (known, sent_of_known) = _inputs_of(parts.data[party]), targets, leaked
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


def _merger(terms: Terms) -> nn.Module:
    """Return a network's merger before training."""
    with scoped(0):
        return models.make_merger(terms.merge).build(terms.widths)


def draw_columns(rows: Tensor, leaks: int, draw: torch.Generator, part: str) -> Tensor:
    """Return the rows in random order; the first `leaks` of them are the leaked rows.

    Args:
        rows: positions among the aligned rows, int64.
        leaks: number of leaked rows.
        draw: generator from which the order is drawn.
        part: name of the part of the split with these rows, for the error text.

    Raises:
        TooFewRowsError: there are fewer rows than `leaks`.
    """
    if leaks > len(rows):
        raise TooFewRowsError(
            f"columns of {leaks} rows should leak", got=f"{len(rows)} {part} rows"
        )
    return rows[torch.randperm(len(rows), generator=draw)]


#: Grants that a feature party can have during the training. No real feature party has the label
#: party's top; results with this grant are upper bounds.
TRAINING = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR, Grant.TOP_RECIPE, Grant.CUTS}
    | {Grant.EPOCHS, Grant.UNLABELLED, Grant.OTHERS_TOP}
)
_COLUMNS_OF_PARTNER = ThreatModel(
    "feature party", "training", frozenset({Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED})
)
#: Grants of a label party at inference; and of a label party that has recorded the training.
RECEIVING = COLUMNS | {Grant.OUTPUTS, Grant.QUERIES}
RECALLING = COLUMNS | {Grant.EPOCHS}


def training_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    k: int,
    draw: torch.Generator,
    new_top: TopMaker | None = None,
    partners: Sequence[str] = (),
    others_top: Maker | None = None,
) -> Case:
    """Return the attack case of a feature party that infers labels of training rows; see `seeking`.

    Args:
        experiment: experiment of the training.
        data: aligned rows of every party; the label party's labels are the true values.
        frames: frames of the training; see `decoded`.
        party: the feature party that attacks.
        k: number of leaked training labels per class; 0 leaks no label.
        draw: generator that draws the leaked rows.
        new_top: function that returns an untrained top for cuts of a given width; None uses a top
            as in the experiment.
        partners: feature parties that share their columns of the same rows with the attacker.
        others_top: function that returns a copy of the label party's trained top; None does not
            grant the top.

    Raises:
        TooFewRowsError: a class has fewer than k training rows.
    """
    label, inputs = data[experiment.label.party], _inputs_of(data[party])
    (labels, classes), train = labels_of(label), torch.from_numpy(label.split.train)
    none = torch.empty(0, dtype=torch.int64)
    known = draw_leak(codes_of(labels[train], classes), k, draw, classes) if k else none
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[known] = False
    targets, leaked = train[rest], train[known]
    exchanges = recorded_exchanges(frames, party, torch.cat([targets, leaked]))
    up = [SentCuts(one.step, one.epoch, one.rows, one.cuts()) for one in exchanges]
    first, second = _in_two(up, len(targets), len(leaked))
    seen = replace(first, inputs=inputs[targets])
    leak = replace(second, inputs=inputs[leaked], labels=labels[leaked])
    holdings = Holdings(
        targets=seen,
        leaked=leak if k else None,
        unlabelled=seen,
        exchanges=exchanges,
        prior=_prior_of(label),
        new_top=new_top or top_recipe(experiment, classes),
        others_top=others_top,
        partners=[
            View(_COLUMNS_OF_PARTNER, classes, Holdings(asked, Evidence(of[leaked]), asked))
            for of in (_inputs_of(data[name]) for name in partners)
            for asked in [Evidence(of[targets])]
        ],
    )
    grants = _with_leaks(TRAINING, k, classes)
    grants -= {Grant.OTHERS_TOP} if others_top is None else set()
    grants |= {Grant.PARTNERS} if partners else set()
    threat = ThreatModel("feature party", "training", grants, colluding=tuple(partners))
    return seeking(Case(View(threat, classes, holdings), labels[targets]))


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
    up = [one for of, one in _messages(trained, party, order) if of.kind is Kind.CUT]
    second, first = _in_two(up, leaks, len(order) - leaks)
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


#: Grants of an outsider that has complete rows with labels and queries the model with them.
QUERYING = frozenset(
    {Grant.INPUTS, Grant.LABELS, Grant.OUTPUTS, Grant.LEAKED_INPUTS, Grant.PRIOR}
    | {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, eq=False)
class Queried:
    """Groups of rows in a membership attack, as int64 positions among the aligned rows.

    Attributes:
        members: training rows.
        others: non-members: the same number of rows on which the network was not trained.
        own: further labelled rows that the attacker has, on which it trains its own networks.
    """

    members: Tensor
    others: Tensor
    own: Tensor

    @property
    def targets(self) -> Tensor:
        """Return the rows for the attacker's queries: first members, then non-members."""
        return torch.cat([self.members, self.others])


def queried_case(
    experiment: Experiment, data: Mapping[str, PartyData], rows: Queried, outputs: Tensor
) -> Case:
    """Return the case of an outsider that infers which of its complete rows were trained on.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        rows: the members, the non-members, and the attacker's own rows.
        outputs: the network's outputs for `rows.targets`, axes (targets, classes).

    Raises:
        UserError: the labels are numeric, not classes.
    """
    label = data[experiment.label.party]
    labels, classes = classes_of(label)
    terms = Terms.of(experiment, "predict", experiment.name)
    inputs = [_inputs_of(data[name]) for name in terms.parties]
    joint = torch.cat([columns.flatten(1) for columns in inputs], 1)
    shapes = [tuple(columns.shape[1:]) for columns in inputs]
    recipes = [
        bottom_recipe(experiment, name, shape)
        for name, shape in zip(terms.parties, shapes, strict=True)
    ]

    holdings = Holdings(
        targets=Evidence(joint[rows.targets], None, labels[rows.targets], outputs),
        leaked=Evidence(joint[rows.own], labels=labels[rows.own]),
        prior=_prior_of(label),
        new_bottom=lambda: models.JointBottom([one() for one in recipes], shapes, _merger(terms)),
        new_top=top_recipe(experiment, classes),
    )
    view = View(ThreatModel("outsider", "inference", QUERYING), classes, holdings)
    member = torch.arange(len(rows.targets)) < len(rows.members)
    return Case(view, labels[rows.targets], positive=member)


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


_HOLDS = {
    "feature party": frozenset(
        {Grant.INPUTS, Grant.LEAKED, Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
    ),
    "label party": frozenset(
        {Grant.LABELS, Grant.LEAKED_INPUTS, Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
    ),
}
_LEAKS = frozenset({Grant.LEAKED, Grant.LEAKED_INPUTS})


def begin(
    adversary: ActiveAdversary,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    known: int,
    draw: torch.Generator,
) -> None:
    """Give an adversary its view before the first training step; see `held`.

    Raises:
        NotGrantedError: no party of the adversary's kind has all the values that it needs.
    """
    view = held(adversary, experiment, data, party, known, draw)
    adversary.begin(view.only(adversary.holds), draw)


def held(
    adversary: ActiveAdversary,
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    known: int,
    draw: torch.Generator,
) -> View:
    """Return the view that an adversary has before the first training step.

    As a feature party, it has the labels of some training rows. As a label party, it has the
    victim's columns of the validation rows, which stand for public rows of the same kind.

    Args:
        adversary: the adversary.
        experiment: experiment of the training.
        data: every party's aligned rows.
        party: the feature party that is the adversary, or is attacked by it.
        known: number of training rows of each class whose labels a feature party has; at most the
            number of training rows of the rarest class.
        draw: generator from which these rows are drawn.

    Raises:
        UserError: the labels are numeric, not classes.
        TooFewRowsError: the adversary needs leaked rows, and would have none.
    """
    label, inputs = data[experiment.label.party], _inputs_of(data[party])
    (labels, classes), train = classes_of(label), torch.from_numpy(label.split.train)
    if adversary.who == "feature party":
        rarest_count = int(labels[train].bincount(minlength=classes).min())
        rows = train[draw_leak(labels[train], min(known, rarest_count), draw)]
    else:
        rows = torch.from_numpy(label.split.validation)
    if adversary.holds & _LEAKS and not len(rows):
        raise TooFewRowsError(
            f"a {adversary.who} would know no rows before the training",
            want="training rows of every class, or data.validation > 0 for a label party",
        )
    own = inputs[train] if adversary.who == "feature party" else None
    shape = tuple(inputs.shape[1:])
    holdings = Holdings(
        targets=Evidence(own, labels=labels[train]),
        leaked=Evidence(inputs[rows], labels=labels[rows]),
        prior=_prior_of(label),
        new_bottom=bottom_recipe(experiment, party, shape),
        new_top=top_recipe(experiment, classes),
        shape=shape,
    )
    grants = _HOLDS[adversary.who]
    threat = ThreatModel(adversary.who, "training", grants, behaviour="malicious")
    return View(threat, classes, holdings)
