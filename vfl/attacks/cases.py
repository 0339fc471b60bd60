"""Cases: the data that a trained victim, or the recording of a training, gives an attacker.

Each builder turns the experiment, aligned rows and the recorded or trained data into a `Case`: a
view under a threat model, and the truth.
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
    """Return positions of k rows of each class, ascending by class; int64, axes (classes * k,).

    A larger draw from the same generator state begins with the same k rows. A curve over k
    therefore adds leaked rows and does not replace them.

    Args:
        labels: int64 codes 0..C-1 of the rows that may leak, axes (rows,).
        k: number of rows of each class.
        draw: generator of the choice.
        classes: number of classes; None counts classes up to the highest code of these rows, and
            misses higher classes without a row.

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
    """Make a top like the label party's, for cuts of a given width."""
    return lambda width: models.make_top(experiment.label.top).build(width, classes)


def bottom_recipe(experiment: Experiment, party: str, shape: tuple[int, ...]) -> Maker:
    """Makes a bottom like a party's, for rows of these axes."""
    asked = experiment.parties[party]
    return lambda: models.make_bottom(asked.bottom).build(shape, asked.width)


Frames = Iterable[tuple[Replayed, Tensor]]


def decoded(
    trace: Iterable[Recorded], terms: Terms, split: Split
) -> Iterator[tuple[Replayed, Tensor]]:
    """Yield each frame of a trace in memory with its rows and the values its receiver decoded.

    Args:
        trace: every cut, gradient and query of a session, in the order of sending.
        terms: terms of the session.
        split: its aligned rows.

    Raises:
        FrameError: the codec could not have produced these bytes.
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
    """Return the training exchanges of one feature party's link, in order.

    Args:
        frames: frames of a training; the function ignores frames of other phases.
        party: the feature party.
        rows: positions among the aligned rows that are of interest, in the order that
            `RecordedExchange.rows` counts in; int64. Other rows are left out of an exchange.
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
    """Return the last cut that a feature party sent of each row, axes (rows, width).

    Args:
        frames: frames of every phase that should count.
        party: the feature party.
        rows: positions among the aligned rows, int64.

    Raises:
        DataError: the recording has no cut of one of these rows.
    """
    messages = _messages(frames, party, rows)
    found, missing = _latest((one for of, one in messages if of.direction == "up"), len(rows))
    if missing.any():
        raise DataError(
            f"not every row has a recorded cut of party '{party}'",
            got=f"none of {int(missing.sum())} of {len(rows)} rows",
            fix="record the phase these rows belong to: [trace] phases",
        )
    return found


def _messages(frames: Frames, party: str, rows: Tensor) -> Iterator[tuple[Replayed, SentCuts]]:
    """Yield the frames of one party's link, each with its values for the selected rows."""
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
    """Return each row's last cut, axes (rows, width), and a mask of rows without, axes (rows,)."""
    found, missing = torch.empty(0), torch.ones(rows, dtype=torch.bool)
    for one in messages:
        if not len(found):
            found = torch.zeros(rows, one.cuts.shape[1])
        found[one.rows] = one.cuts
        missing[one.rows] = False
    return found, missing


def _in_two(messages: Sequence[SentCuts], first: int, second: int) -> tuple[Evidence, Evidence]:
    """Split all messages by group of rows, first rows or rest; return the last cuts too.

    The schedule omits a last batch with a single row; in this case no cuts are returned.
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
#: Grants of a feature party while the network is used; an attack receives those that it needs.
INFERENCE = frozenset(
    {Grant.INPUTS, Grant.BOTTOM, Grant.CUTS, Grant.LEAKED, Grant.UNLABELLED}
    | {Grant.PRIOR, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """For each group of rows, the part of the split that it is drawn from, and who trained.

    Attributes:
        targets: the rows that are attacked.
        leaks: part of the split from which leaked labels are drawn.
        unlabelled: unlabelled rows; by default the targets themselves.
        trained_by: see `ThreatModel`.
    """

    targets: Part = "test"
    leaks: Part = "train"
    unlabelled: Part = "test"
    trained_by: TrainedBy = "split"


def labels_of(label: PartyData) -> tuple[Tensor, int]:
    """Return the labels of all rows, axes (rows,), and the number of classes; 1 for numbers."""
    assert label.labels is not None, "a label party has some"
    return label.labels, 1 if label.classes is None else len(label.classes)


def codes_of(labels: Tensor, classes: int) -> Tensor:
    """Return class codes for the draw of leaked rows; for numeric labels all rows have one code."""
    return labels if classes > 1 else torch.zeros(len(labels), dtype=torch.int64)


def classes_of(label: PartyData) -> tuple[Tensor, int]:
    """Return the labels of all rows, int64, axes (rows,), and the number of classes.

    Raises:
        UserError: the labels are numbers, not classes.
    """
    if label.classes is None or label.labels is None:
        raise UserError("a regression has no classes to infer", where="label.task")
    return label.labels, len(label.classes)


def _inputs_of(data: PartyData) -> Tensor:
    assert data.inputs is not None
    return data.inputs


def _prior_of(label: PartyData) -> Tensor | None:
    """Share of each class among the training rows, axes (classes,); None for numeric labels."""
    labels, classes = labels_of(label)
    if classes == 1:
        return None
    train = labels[torch.from_numpy(label.split.train)]
    return train.bincount(minlength=classes) / len(train)


def _with_leaks(grants: frozenset[Grant], k: int, classes: int) -> frozenset[Grant]:
    """Grants without leaked labels or class shares that the case does not have."""
    absent = {Grant.LEAKED: not k, Grant.PRIOR: classes == 1}
    return grants - {grant for grant, is_absent in absent.items() if is_absent}


class Victim:
    """A trained feature party that answers queries, and labels that it is not supposed to learn.

    The attacker knows the architectures of the experiment, without the parts that a defense adds.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows; the label party's labels are the truth.
        party: the feature party that attacks.
        weights: its trained weights.
        secret: the party's secret, from which noise on queries is drawn. None derives a substitute
            from the seed.

    Raises:
        UserError: the feature party does not exist.
        ExposedCutError: the training shares its first layers, so no party has a bottom model.
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
        """Return the party with its trained state from a run folder.

        Args:
            folder: the run.
            data: rows of every party, as `vfl.training.run.load_data` returns them for the
                experiment.
            party: the feature party that attacks.

        Raises:
            RunFolderError: the weights are missing; in a federation they stay with their party.
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
        """Return the case of k leaked labels of each class.

        Args:
            k: number of leaked labels per class; with 0 the view grants no leaked labels.
            draw: generator that draws the leaked rows.
            setting: roles of the rows.
            snapshots: the party's weights after every epoch, if they were stored.
            partners: feature parties that share their data about the same rows with the attacker.

        Raises:
            TooFewRowsError: a class has fewer rows to leak.
            UserError: a leaked row is also a row under attack.
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
        """Return the cuts that the label party receives for repeated queries, each in a new order.

        Args:
            rows: positions among the aligned rows, int64; `SentCuts.rows` counts in their order.
            times: number of repetitions.
            draw: generator of the orders.
        """
        found = []
        for time in range(1, times + 1):
            order = torch.randperm(len(rows), generator=draw)
            found.append(SentCuts(time, time, order, self.cuts(rows[order])))
        return found

    def _makers(self) -> Holdings:
        """Return holdings that contain only functions that make models."""
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
        """Return evidence about a part of the split, without labels; the network runs only once."""
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
        """Return a copy of the bottom, or an earlier one, with the layers of defense and codec."""
        return copy.deepcopy(self._own) if weights is None else self._trained(weights)[1]

    def _rows(self, part: Part) -> Tensor:
        return torch.from_numpy(getattr(self._split, part))


Weights = Mapping[str, Mapping[str, Tensor]]


class TrainedParts:
    """Modules and weights of one trained network.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        weights: trained weights of all parties, as `LocalSession.weights` returns them.

    Attributes:
        lacking: grants of a label party that these parts cannot meet.
    """

    lacking: frozenset[Grant] = frozenset()

    def __init__(
        self, experiment: Experiment, data: Mapping[str, PartyData], weights: Weights
    ) -> None:
        self.experiment, self.data, self._weights = experiment, data, weights
        self._terms = Terms.of(experiment, "predict", experiment.name)

    def bottom(self, party: str) -> nn.Module:
        """Return a party's bottom; a feature party's has the layers of defense and codec."""
        asked, codec = self._terms.parties[party], compression.make(self._terms.codec)
        shape = tuple(_inputs_of(self.data[party]).shape[1:])
        with scoped(0):  # whatever is drawn is overwritten
            bottom = models.make_bottom(asked.bottom).build(shape, asked.width)
            made = nn.ModuleDict({"bottom": bottom})
            if party != self._terms.label_party:
                made["bottom"] = self._defense().wrap_bottom(bottom, asked.width)
                if adapter := codec.client_module(asked.width):
                    made["codec"] = adapter
        self._load(made, party)
        return nn.Sequential(*made.values()).eval()

    def new_bottom(self, party: str) -> nn.Module:
        """Return an untrained bottom like a feature party's."""
        shape = tuple(_inputs_of(self.data[party]).shape[1:])
        return bottom_recipe(self.experiment, party, shape)()

    def top(self) -> nn.Module:
        """Return the label party's top."""
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
        """Return the trained merger; it takes the cuts of all parties in merge order."""
        made = nn.ModuleDict({"merger": _merger(self._terms)})
        self._load(made, self._terms.label_party)
        return made["merger"].eval()

    def merged_with(self, party: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that merges a party's cuts with those of a label party with columns."""
        order, merger = list(self._terms.parties), self.merger()
        if order.index(party) < order.index(self._terms.label_party):
            return merger
        return lambda victims, own: merger(own, victims)

    def outputs(self, queries: Frames, rows: Tensor) -> Tensor:
        """Return the network's outputs for rows whose cuts were recorded, axes (rows, classes).

        Args:
            queries: recorded frames of every feature party; each party's are read once.
            rows: positions among the aligned rows, int64.

        Raises:
            DataError: some rows' cuts were not recorded.
        """
        cuts = [self._cuts(name, queries, rows) for name in self._terms.parties]
        with torch.no_grad():
            merged = self.merger()(*cuts)
        return self._defense().logits(through(self.top(), merged), StepContext())

    def _cuts(self, party: str, queries: Frames, rows: Tensor) -> Tensor:
        """Return one party's cuts as the top receives them."""
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
        """Load the weights of these parts out of a party's."""
        weights = self._weights[party].items()
        parts.load_state_dict({k: value for k, value in weights if k.split(".")[0] in parts})


#: Grants of a label party besides cuts, and the victim's bottom as a bound.
COLUMNS = frozenset(
    {Grant.CUTS, Grant.LABELS, Grant.LEAKED_INPUTS, Grant.BOTTOM_RECIPE}
    | {Grant.TOP, Grant.OTHERS_BOTTOM}
)
#: Further grants of a label party with columns of its own.
OWN_COLUMNS = frozenset({Grant.INPUTS, Grant.BOTTOM})


def columns_case(
    parts: TrainedParts,
    party: str,
    targets: tuple[Tensor, Evidence],
    leaked: tuple[Tensor, Evidence],
    threat: ThreatModel,
) -> Case:
    """Return a case of a label party that reconstructs the columns of some rows.

    Args:
        parts: parts of the trained network.
        party: the feature party that is attacked.
        targets: the attacked rows: their positions among the aligned rows, int64, and the values
            about them that the label party received.
        leaked: rows whose columns leaked, in the same form as `targets`.
        threat: grants of the attacker; own columns of the label party add their grants.
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
    """Return the merger of a network; its weights, if any, are untrained."""
    with scoped(0):
        return models.make_merger(terms.merge).build(terms.widths)


def draw_columns(rows: Tensor, leaks: int, draw: torch.Generator, part: str) -> Tensor:
    """Return the rows in random order with the leaked rows first.

    Args:
        rows: positions among the aligned rows, int64.
        leaks: number of leaked rows.
        draw: generator of the order.
        part: name of this part of the rows, for the error text.

    Raises:
        TooFewRowsError: there are fewer rows than labels to leak.
    """
    if leaks > len(rows):
        raise TooFewRowsError(
            f"columns of {leaks} rows should leak", got=f"{len(rows)} {part} rows"
        )
    return rows[torch.randperm(len(rows), generator=draw)]


#: Grants of a feature party during the training, and the label party's top as a bound.
TRAINING = frozenset(
    {Grant.INPUTS, Grant.GRADIENTS, Grant.LEAKED, Grant.PRIOR, Grant.TOP_RECIPE, Grant.CUTS}
    | {Grant.EPOCHS, Grant.UNLABELLED, Grant.OTHERS_TOP}
)
_COLUMNS_OF_PARTNER = ThreatModel(
    "feature party", "training", frozenset({Grant.INPUTS, Grant.LEAKED, Grant.UNLABELLED})
)
#: Grants of a label party while the network is used, and of one that recorded the training.
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
    """Return a case of a feature party that infers training labels; see `seeking`.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows; the label party's labels are the truth.
        frames: frames of the training; see `decoded`.
        party: the feature party that attacks.
        k: number of leaked training labels per class; 0 leaks no label.
        draw: generator that draws the leaked rows.
        new_top: makes an untrained top for cuts of a width; None is the experiment's.
        partners: feature parties that give the attacker their columns of the same rows.
        others_top: returns a copy of the label party's final top; None grants no top.

    Raises:
        TooFewRowsError: a class has fewer rows than labels to leak.
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
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
    again: Callable[[Tensor], Sequence[SentCuts]] | None = None,
) -> Case:
    """Return a case of a label party that reconstructs a feature party's test rows from messages.

    Leaked rows are validation rows. Their cuts of the last epoch and the test rows' cuts come from
    the same weights, unless the training kept the weights of an earlier epoch.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        frames: frames of the training's validation and test; see `decoded`.
        party: the attacked feature party.
        leaks: number of validation rows whose columns leaked.
        draw: generator that draws the leaked rows.
        weights: all parties' trained weights, as `LocalSession.weights` returns them.
        again: function that returns the messages for repeated queries of some aligned rows, like
            `Victim.asked_again`; None if queries are not repeated.

    Raises:
        TooFewRowsError: there are fewer validation rows than labels to leak.
        DataError: some rows' cuts were not recorded.
    """
    return received_of(TrainedParts(experiment, data, weights), frames, party, leaks, draw, again)


def received_of(
    parts: TrainedParts,
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    again: Callable[[Tensor], Sequence[SentCuts]] | None = None,
) -> Case:
    """Return the case of `received_case` for the parts of a trained network."""
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
    experiment: Experiment,
    data: Mapping[str, PartyData],
    frames: Frames,
    party: str,
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
) -> Case:
    """Return a case of a label party that reconstructs training rows from all their messages.

    The arguments are those of `received_case`; frames are those of the training, and the rows that
    leak are training rows.

    Raises:
        TooFewRowsError: there are fewer training rows than labels to leak.
        DataError: some rows' cuts were not recorded.
    """
    return recalled_of(TrainedParts(experiment, data, weights), frames, party, leaks, draw)


def recalled_of(
    parts: TrainedParts, frames: Frames, party: str, leaks: int, draw: torch.Generator
) -> Case:
    """Return the case of `recalled_case` for the parts of a trained network."""
    train = torch.from_numpy(parts.data[parts.experiment.label.party].split.train)
    order = draw_columns(train, leaks, draw, "training")
    trained = [(frame, values) for frame, values in frames if frame.phase == "train"]
    last_cuts(trained, party, order)  # refuses rows without any
    up = [one for of, one in _messages(trained, party, order) if of.kind is Kind.CUT]
    second, first = _in_two(up, leaks, len(order) - leaks)
    threat = ThreatModel("label party", "training", RECALLING)
    return columns_case(parts, party, (order[leaks:], first), (order[:leaks], second), threat)


#: Grants of the server of a U-shape, which has neither columns nor labels of the rows.
SERVING = frozenset(
    {Grant.CUTS, Grant.AUXILIARY, Grant.MIDDLE, Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


def served_case(received: Case, middle: Maker, new_top: TopMaker) -> Case:
    """Return the case of a U-shape's server that knows a few rows of the same kind whole.

    Args:
        received: rows and cuts, of `received_case`.
        middle: makes a copy of the server's layers.
        new_top: makes untrained last layers for what these return.
    """
    threat = ThreatModel("label party", "inference", SERVING)
    view = received.view.instead(middle=middle, new_top=new_top)
    return replace(received, view=view.under(threat))


#: Grants of a label party that learned the attribute of a few rows.
ATTRIBUTE = frozenset({Grant.CUTS, Grant.LEAKED_ATTRIBUTES})
#: Further grants, if the case of the rows has them.
REPEATED = frozenset({Grant.EPOCHS, Grant.QUERIES})


def require_column(columns: int, column: int | None) -> None:
    """Refuse an attribute that is not one of the victim's columns.

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
    """Return a case: a receiver of cuts infers whether a column of each target is above its mean.

    Args:
        received: the rows and cuts, of `received_case` or `recalled_case`; see
            `decoded`.
        known: the victim's training rows, axes (rows, ...), which determine the mean.
        column: position of the column in a row, from 0; None takes the column that divides the
            training rows most evenly, the first of equal ones.

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


#: Grants of an outsider who has whole rows with labels and requests their predictions.
QUERYING = frozenset(
    {Grant.INPUTS, Grant.LABELS, Grant.OUTPUTS, Grant.LEAKED_INPUTS, Grant.PRIOR}
    | {Grant.BOTTOM_RECIPE, Grant.TOP_RECIPE}
)


@dataclass(frozen=True, eq=False)
class Queried:
    """Rows of a query, int64 positions among the aligned rows.

    Attributes:
        members: training rows.
        others: the same number of rows that were not trained on.
        own: further rows with labels that the attacker owns, to train its own networks.
    """

    members: Tensor
    others: Tensor
    own: Tensor

    @property
    def targets(self) -> Tensor:
        """The rows that are asked about, members first."""
        return torch.cat([self.members, self.others])


def queried_case(
    experiment: Experiment, data: Mapping[str, PartyData], rows: Queried, outputs: Tensor
) -> Case:
    """Return a membership case: an outsider with complete rows infers which were trained on.

    Args:
        experiment: experiment of the training.
        data: every party's aligned rows.
        rows: rows of the queries.
        outputs: the network's outputs for `rows.targets`, axes (targets, classes).
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


#: Grants of a label party that learns sums of cuts and colludes with some of their senders.
SUMMING = COLUMNS | {Grant.PARTNERS}
_PARTNER = frozenset({Grant.CUTS, Grant.LEAKED_INPUTS})


def summed_case(
    experiment: Experiment,
    data: Mapping[str, PartyData],
    party: str,
    partners: Sequence[str],
    leaks: int,
    draw: torch.Generator,
    weights: Weights,
) -> Case:
    """Return a case of a label party that reconstructs test rows from sums and partners' cuts.

    Args:
        experiment: experiment of the training, with ``secure = "sum"``.
        data: every party's aligned rows.
        party: the feature party that is attacked.
        partners: feature parties that give their cuts to the label party; empty without partners.
        leaks: number of validation rows whose columns leaked.
        draw: generator that draws the leaked rows.
        weights: everybody's trained weights, as `LocalSession.weights` gives them.

    Raises:
        UserError: the label party sees each cut anyway, so it has nothing to infer.
        TooFewRowsError: there are fewer validation rows than labels to leak.
    """
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
        """Return a party's encoded cuts for the sum, without the masks, which cancel out."""
        victim = Victim(experiment, data, name, weights[name])
        return ring.encode(victim.cuts(rows), name, 0).tobytes()

    terms = {name: [encoded(name, rows) for rows in groups] for name in everybody}
    width = experiment.parties[party].width

    def summed(group: int, *names: str) -> Evidence:
        """Return the decoded sum of these parties' cuts of a group."""
        masked = [terms[name][group] for name in names]
        return Evidence(cuts=ring.decode(masked, len(groups[group]), width))

    grants = SUMMING if partners else COLUMNS
    threat = ThreatModel("label party", "inference", grants, colluding=tuple(partners))
    targets, leaked = ((rows, summed(of, *everybody)) for of, rows in enumerate(groups))
    case = columns_case(TrainedParts(experiment, data, weights), party, targets, leaked, threat)
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
    """Give an adversary its data before the first step; see `held`.

    Raises:
        NotGrantedError: no party of the adversary's kind has the required data.
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
    """Return the holdings of a party of an adversary's kind before the first step.

    A feature party knows the labels of some training rows; a label party knows the victim's columns
    of the validation rows, like public rows of the same kind.

    Args:
        adversary: the adversary.
        experiment: experiment of the training.
        data: every party's aligned rows.
        party: the feature party that acts as the adversary, or is its victim.
        known: number of training rows per class whose labels a feature party knows, at most the
            size of the rarest class.
        draw: generator that draws these rows.

    Raises:
        TooFewRowsError: no rows are left that the adversary could know.
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
            f"no rows are left for a {adversary.who} to know",
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
