"""Check a session's terms against the limits that a party's own file sets, and limit frame sizes.

Both parties compute the largest size of a frame: the codec, the width and the largest number of
rows in an exchange determine the size of a cut, its gradient or a message of a secure mode. If a
frame is larger, the receiver refuses it after reading its header, before memory is allocated.

W is the width of a cut: the number of cut-layer activations of a row. R is the number of rows of a
training batch, and Q the number of rows of a query (at most 1,024). f is the number of feature
parties; n is f plus the number of dealers (0 or 1). C is the number of columns of a party's shared
layer, and C' the number of columns of the layer that another party shares with this party; both
include one column for the bias. The table gives the largest payloads in bytes: before the semicolon
those sent to the label party, after the semicolon those sent by the label party. Frames of other
kinds must have an empty payload, and no payload exceeds 512 MiB. Alignments, and secure modes
without cuts, have other limits:

    cut; gradient              the codec's largest payload for R W; the same
    query; answer              the codec's largest payload for Q W; 1
    refusal; request           1; 4 Q (serving)
    cut, query of sum:bits=b   R W b/8, Q W b/8; 4 R W + 64, 1
    keys (PROTOCOL)            104, from a third party at least 32 f; 104 n
    beaver: opened             8 (R C + C' W) + 32; 8 (R C' + C W + R W) + 32
      outputs; gradient        8 R W; 8 (R W + C' W)
    a third party: opened      8 R C; 8 C W
      outputs; gradient        8 R W; 8 R W
      its dealt shares         8 f R W, and 8 W (sum of all C); 4
    sealed (middle, tasks)     16 more; to the recipient, the largest of the parties; the same
      key of a pair            104; 104 (PROTOCOL)
    last report (DONE)         1,024; 0
    error, ends the link       65,536; 65,536

For openings (of shares) in a query, Q replaces R. Let w be the largest number of unread frames:
train.in_flight + 3, and several times as many if parties exchange sealed frames. Let T and F be the
largest payloads in bytes to and from the label party. For one party, the label party then buffers
at most w (T + 16) + 65,552 + w (F + 16) bytes; ``vfl check`` prints this number
(held_bytes_per_party).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from vfl import compression, defenses, models
from vfl.compression import Codec
from vfl.config import Consent, PartyFile
from vfl.config.experiment import NETWORK
from vfl.core.errors import ConfigError, ConsentError
from vfl.core.frame import HEADER_BYTES, LIMIT_BYTES, Kind
from vfl.core.registry import parts
from vfl.core.version import VERSION
from vfl.datasets import Split
from vfl.datasets.alignment.protocols import PROTOCOLS
from vfl.defenses.base import FIT_ROWS
from vfl.models import Bottom, JointBottom, Merger, Shape
from vfl.models.footprint import footprint
from vfl.models.optimizers import Optimization
from vfl.session import rules, secure_mode
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.handshake import REPORT_LIMIT_BYTES
from vfl.session.ranges import out_of_range
from vfl.session.schedule import QUERY_ROWS, REFUSAL_BYTES, ROW_BYTES
from vfl.session.secure_mode import Layers
from vfl.session.store.session_ledger import Spent
from vfl.session.terms import AlignTerms, Terms
from vfl.transport.handshake import ANSWER_LIMIT_BYTES
from vfl.transport.link import LinkLimits
from vfl.transport.pairs import OFFER_BYTES, TAG_BYTES

#: Two texts: the session's request, and the limit of the party that this request exceeds.
Difference = tuple[str, str]

#: Size of the label party's answer to a query in bytes; only one such byte per epoch carries
#: information, the decision of early stopping.
_ANSWER_BYTES = 1
#: Largest piece of an alignment message, in bytes.
PIECE_LIMIT_BYTES = 2**18
#: Number of temporary values that a codec, or the addition of noise to a cut, needs for each value
#: of the cut.
_NUMBERS_A_VALUE = 32
#: Number of values that a defense's `fit` stores for each trained parameter: two for the optimiser
#: Adam, and a temporary one.
_FIT_COPIES = 3
#: Number of float32 values whose memory DP-SGD needs for each parameter: a sum of gradients, and
#: noise in float64.
_DP_COPIES = 6
#: Tolerated rounding error when noise is computed from epsilon, or epsilon from noise.
_ROUNDING = 1e-6
#: Kinds of frames in a training exchange (first tuple), and in a query (second tuple).
_TRAINING = (Kind.CUT, Kind.GRAD, Kind.OPENING)
_ASKING = (Kind.QUERY, Kind.ACK, Kind.QUERY_OPENING)


def expected_bytes(terms: Terms, party: str, split: Split, shared: Layers | None = None) -> int:
    """Return the most bytes of the frames in exchanges that a party sends and receives together.

    Args:
        terms: the agreed terms.
        party: name of the party.
        split: split of the rows.
        shared: first layers that the party secret-shares; None if the secure mode shares no layers.
    """
    if shared is not None:  # and the answer to a query has 1 byte
        exchanges = rules.schedule(terms, split)
        return sum(shared.wire_bytes(len(one.rows), one.trains) + 1 for one in exchanges)
    codec = compression.make(terms.codec)
    width = codec.wire_width(terms.parties[party].width)
    return sum(
        codec.payload_limit(len(exchange.rows), width) * (1 + exchange.trains) + 2 * HEADER_BYTES
        for exchange in rules.schedule(terms, split)
    )


def dealt_bytes(terms: Terms, layers: Iterable[Layers], split: Split) -> int:
    """Return the bytes that a dealer (a third party) sends and receives; 0 without a dealer.

    Args:
        terms: the agreed terms.
        layers: secret-shared layers of every feature party.
        split: split of the rows.
    """
    if rules.dealer(terms) is None:
        return 0
    mode, served = secure_mode.make(terms.secure), list(layers)
    exchanges = rules.schedule(terms, split)
    return sum(mode.helper_bytes(served, len(one.rows), one.trains) for one in exchanges)


def check_consent(
    terms: Terms,
    party: str,
    consent: Consent,
    split: Split,
    shared: Layers | None = None,
    *,
    row_shape: Shape | None = None,
    own_bottom: bool = False,
    unaligned: int = 0,
) -> None:
    """Refuse a session that requests more than the party's own file allows.

    Args:
        terms: terms of the requested session.
        party: the party whose consent is checked.
        consent: limits in the party's own configuration file.
        split: split of the rows.
        shared: first layers that the party secret-shares; None if the secure mode shares no layers.
            A party first knows only its own layer; it calls this function again after it has
            received the size of the layer that another party shares with it.
        row_shape: axes of one of the party's rows; None if the party's model was already counted in
            an earlier call. With secret-shared first layers, the count includes the party's share
            of its own layer, and, once `shared` gives the size, its share of another party's layer.
        own_bottom: whether the party's own configuration file names its bottom model, whose size is
            then not limited; the layers that the defense and the codec add are still counted.
        unaligned: number of the party's unaligned rows, which no session uses; a defense's `fit`
            also reads these rows.

    Raises:
        ConsentError: the session exceeds the party's limits; the error lists the differences. The
            checks have three groups: ranges of numbers, settings, and sizes of models. After a
            group with differences, the next groups are not checked.
        SpecError: a codec, defense or bottom cannot be built.
    """
    _check_ranges(terms, party, consent)
    differences = list(_differences(terms, party, consent, split, shared))
    # an exact count is cheap only for sizes within the limits
    if not differences and row_shape is not None:
        differences = list(
            _of_model(terms, party, consent, split, row_shape, own_bottom, unaligned)
        )
        differences += _of_layers(terms, consent, split, _own_layers(terms, party, row_shape))
    _refuse(party, differences)


def check_dealers_consent(terms: Terms, party: str, consent: Consent) -> None:
    """Refuse a session that requests more from a dealer than the dealer's own file allows.

    The number of bytes is unknown before the dealer sends, so the dealer compares its bytes with
    the limit while it sends.

    Raises:
        ConsentError: the error lists every request that exceeds a limit.
    """
    _check_ranges(terms, party, consent)
    differences = [*_of_any_party(terms, party, consent), *_epochs(terms, consent)]
    _refuse(party, [*differences, *_version(terms, consent)])


def check_middles_consent(terms: Terms, party: str, consent: Consent, split: Split) -> None:
    """Refuse a session that requests more from a middle party than this party's own file allows.

    Memory and parameters of the middle model are counted like those of a bottom model whose inputs
    are the merged cuts of all feature parties.

    Raises:
        ConsentError: the error lists every request that exceeds a limit.
        SpecError: a codec or the model cannot be built.
    """
    _check_ranges(terms, party, consent)
    cuts = sum(expected_bytes(terms, name, split) for name in terms.feature_parties)
    differences = [
        *_of_any_party(terms, party, consent),
        *_outside("codec", terms.codec, consent.codecs),
    ]
    differences += _above(consent, "max_bytes", cuts, f"up to {cuts} bytes of cuts")
    _refuse(party, differences)
    _refuse(party, [*_of_merger(terms, consent, max(most_rows(terms, split).values()))])
    at_label = terms.at_label().model_copy(update={"defense": "none"})
    check_consent(at_label, party, consent, split, row_shape=(terms.merged_width,))


def check_tasks_consent(
    terms: Terms, party: str, consent: Consent, split: Split, outputs: int
) -> None:
    """Refuse a session that requests more from a further label party than this party's file allows.

    Args:
        terms: terms of the requested session.
        party: the party whose consent is checked.
        consent: limits in the party's own configuration file.
        split: split of the rows.
        outputs: number of outputs of the further label party's top model.

    Raises:
        ConsentError: the error lists every request that exceeds a limit.
        SpecError: a codec or the top cannot be built.
    """
    _check_ranges(terms, party, consent)
    found = [
        *_of_any_party(terms, party, consent),
        *_epochs(terms, consent),
        *_version(terms, consent),
    ]
    found += [*_of_plugins(terms, consent), *_of_rows(split, consent)]
    _refuse(party, found)  # an exact count is cheap only for sizes within the limits
    needed = sum(expected_bytes(terms, name, split) for name in terms.feature_parties)
    found += _above(consent, "max_bytes", needed, f"up to {needed} bytes")
    top, rows, mine = terms.tasks[party].top, most_rows(terms, split), terms.at_label(party)
    counted = footprint(
        _Top(top),
        (mine.merged_width,),
        outputs,
        batch_size=max(2, rows[Kind.CUT]),
        query_rows=max(1, rows[Kind.QUERY]),
    )
    memory = counted.training_bytes(Optimization(terms.train).copies, 1)
    memory += _value_bytes(max(rows.values()) * mine.merged_width)
    found += _of_size(consent, counted.parameters, memory, f"top {top}")
    _refuse(party, [*found, *_of_merger(mine, consent, max(rows.values()))])


def _of_merger(terms: Terms, consent: Consent, rows: int) -> Iterator[tuple[str, str]]:
    """Yield exceeded limits of a trained merger, at the party that merges the cuts."""
    recipe, widths = models.make_merger(terms.merge), terms.widths
    whole, width = (sum(widths),), recipe.width(widths)
    counted = footprint(_Merging(recipe, widths), whole, width, batch_size=max(2, rows))
    if not counted.parameters:
        return
    memory = counted.training_bytes(Optimization(terms.train).copies, 1)
    yield from _of_size(consent, counted.parameters, memory, f"merger {terms.merge}")


class _Merging(Bottom):
    """Wraps a merger (which combines all cuts), so that `footprint` counts it like a bottom."""

    def __init__(self, recipe: Merger, widths: Sequence[int]) -> None:
        self._recipe, self._widths = recipe, widths

    def build(self, shape: Shape, width: int) -> nn.Module:
        cuts, merger = [nn.Identity() for _ in self._widths], self._recipe.build(self._widths)
        return JointBottom(cuts, [(one,) for one in self._widths], merger)


class _Top(Bottom):
    """Wraps a top model so that `footprint` counts it like a bottom model."""

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def build(self, shape: Shape, width: int) -> nn.Module:
        return models.make_top(self._spec).build(math.prod(shape), width)


def check_alignment(terms: Terms, party: str, consent: Consent) -> None:
    """Refuse an alignment that requests more than a party's own file allows.

    The numbers of ids are checked later, while the alignment runs.

    Raises:
        ConsentError: the error lists every request that exceeds a limit.
    """
    _check_ranges(terms, party, consent)
    found = [*_of_any_party(terms, party, consent), *_version(terms, consent)]
    if party != terms.label_party:  # the label party requests the alignment itself
        found += _outside("missing_rows", terms.missing_rows, consent.missing_rows)
        if isinstance(terms, AlignTerms) and PROTOCOLS.make(terms.protocol).reuse:
            reuse = consent.reuse_alignment_keys
            found += (
                [] if reuse else [("align.protocol with reuse", "reuse_alignment_keys = false")]
            )
    _refuse(party, found)


def check_explained(terms: Terms, consent: Consent | None = None) -> None:
    """Refuse to explain columns if the model, or the label party's file, does not allow this.

    Args:
        terms: terms of the requested session.
        consent: limits in the label party's own configuration file; None if one process runs all
            parties.

    Raises:
        ConfigError: the contribution of each column cannot be computed for this model.
        ConsentError: the label party's file does not name a party whose columns would be explained.
    """
    if terms.explained and not secure_mode.make(terms.secure).explains_columns:
        raise ConfigError(
            "this model cannot compute the contribution of each column",
            where=f"--explain {terms.explained[0]}",
            want="a run of boosted trees",
            fix="vfl value computes each party's contribution to a network",
        )
    others = [name for name in terms.explained if name != terms.label_party]
    if consent is None or set(others) <= set(consent.explains):
        return
    raise ConsentError(
        f"party '{terms.label_party}' does not consent to disclose contributions of "
        "others' columns",
        where="--explain",
        got=f"explained to {', '.join(others)}",
        want=f"explained to {', '.join(consent.explains) or 'no party'}",
        fix=f"explains = {json.dumps(others)} in the [consent] of its own file: the party "
        "holds the labels, and these values disclose something about them",
    )


def check_layers(
    terms: Terms, party: str, consent: Consent, split: Split | None, layers: Layers
) -> None:
    """Refuse secret-shared first layers that are too large, as soon as the layers' sizes are known.

    Raises:
        ConsentError: the error lists every request that exceeds a limit.
    """
    found = list(_of_layers(terms, consent, split, layers))
    if secure_mode.make(terms.secure).divides_rows:  # an earlier call counted no rows
        found += _of_privacy(terms, consent, getattr(layers, "training_rows", 0))
    _refuse(party, found)


def check_rows(party: str, rows: int, consent: Consent) -> None:
    """Refuse more rows than the party's own file allows.

    The function serves a party that receives only the number of rows.

    Raises:
        ConsentError: the number of rows exceeds the party's limit; the error states both numbers.
    """
    _refuse(party, list(_above(consent, "max_rows", rows, f"{rows} rows")))


def check_spent(party: str, spent_bytes: int, most_bytes: int) -> None:
    """Refuse to continue if a party has sent and received more bytes than its file allows.

    Raises:
        ConsentError: the number of bytes exceeds the party's limit; the error states both numbers.
    """
    if spent_bytes > most_bytes:
        raise ConsentError(
            f"party '{party}' does not consent to continue",
            got=f"{spent_bytes} bytes sent and received",
            want=f"bytes <= {most_bytes}",
            fix="run a shorter session, or set a larger max_bytes in the [consent] of the party's "
            "own file",
        )


def check_ranks(party: PartyFile, terms: Terms, split: Split, asked: int) -> None:
    """Refuse a session with more ranks than a party runs, or with settings that exclude ranks.

    An honest label party makes the same check before it invites the party.

    Raises:
        ConsentError: the session has too many ranks, or a setting that is impossible with several
            ranks; the error names it.
        ConfigError: the party is set to record a trace, which would contain only the frames of rank
            0.
    """
    if asked == 1:
        return
    try:
        rules.refuse_ranks(terms, split, asked)
    except ConfigError as mistake:
        raise ConsentError(
            f"party '{party.party}' does not consent: {mistake.what}",
            where=mistake.where,
            got=mistake.got,
        ) from None
    refuse_trace(party, asked)
    if asked > (own := party.ranks):
        raise ConsentError(
            f"party '{party.party}' runs fewer ranks than the session needs",
            got=f"{asked} ranks",
            want=f"at most {own}",
            fix=f"run vfl up party.toml --ranks {asked} at that party, or set fewer ranks at the "
            "label party",
        )


def refuse_trace(party: PartyFile, asked: int) -> None:
    """Refuse to record a trace of a session in which the party runs several ranks.

    Raises:
        ConfigError: the trace would contain the frames of rank 0 only.
    """
    if asked > 1 and party.trace.enabled:
        raise ConfigError(
            "a trace would contain the frames of one rank only",
            where="[trace]",
            got=f"{asked} ranks",
            fix="leave [trace] out, or run one rank at every party",
        )


def _check_ranges(terms: Terms, party: str, consent: Consent) -> None:
    """Refuse settings outside the party's ranges, before any computation uses their values.

    Raises:
        ConsentError: a setting is outside the range that the party accepts; the error lists every
            such setting.
        ConfigError: see `vfl.session.ranges.ranges_of`.
    """
    _refuse(party, list(out_of_range(terms, consent)))


def _refuse(party: str, differences: Sequence[Difference]) -> None:
    if differences:
        raise ConsentError(
            f"party '{party}' does not consent to this session",
            got="; ".join(asked for asked, _ in differences),
            want="; ".join(allowed for _, allowed in differences),
            fix="change the experiment, or the [consent] table of the party's own file",
        )


def _differences(
    terms: Terms, party: str, consent: Consent, split: Split, shared: Layers | None
) -> Iterator[Difference]:
    yield from _of_any_party(terms, party, consent)
    # Check consent to disclose to the label party which of the aligned rows this party has.
    yield from _outside("missing_rows", terms.missing_rows, consent.missing_rows)
    if branched := [name for name, one in terms.parties.items() if one.branches > 1]:
        yield (
            f"branches of '{branched[0]}'",
            "in a federation, all rows of each party on one machine",
        )
    if more := [name for name in terms.tasks if name not in consent.label_parties]:
        allowed = ", ".join(consent.label_parties) or "none"
        wanted = f"label parties in addition to '{terms.label_party}': {', '.join(more)}"
        yield wanted, f"further label parties: {allowed}"
    if terms.middle is not None and terms.middle.party not in consent.middle:
        allowed = ", ".join(consent.middle) or "no party"
        yield (
            f"cuts for the middle party '{terms.middle.party}'",
            f"cuts for the middle party {allowed}",
        )
    yield from _of_plugins(terms, consent)
    width, behind = terms.parties[party].width, ""
    if width <= consent.max_width:
        codec, behind = compression.make(terms.codec), f" behind codec {terms.codec}"
        codec.check(width)
        width = codec.wire_width(width)
    yield from _above(consent, "max_width", width, f"width {width}{behind}")
    yield from _of_rows(split, consent)
    too_long = _epochs(terms, consent)
    yield from too_long
    # in this mode the party counts bytes while it sends
    whole = secure_mode.make(terms.secure).whole_network
    if not too_long and width <= consent.max_width and not whole:
        needed = expected_bytes(terms, party, split, shared)
        yield from _above(consent, "max_bytes", needed, f"up to {needed} bytes")
    if not too_long and not secure_mode.make(terms.secure).divides_rows:
        yield from _of_privacy(terms, consent, len(split.train))
    yield from _of_layers(terms, consent, split, shared)
    yield from _version(terms, consent)


def _of_privacy(terms: Terms, consent: Consent, rows: int) -> Iterator[Difference]:
    """Check that [dp] gives at least the privacy that the party's own file requires."""
    noise, epsilon = consent.min_dp_noise, consent.max_dp_epsilon
    if terms.mode != "train" or noise is epsilon is None:
        return
    wanted = [] if noise is None else [f"dp noise >= {noise:g}"]
    wanted += [] if epsilon is None else [f"dp epsilon <= {epsilon:g}, delta < 1/{rows}"]
    plan = PrivacyPlan.of(terms, rows)
    if plan is None:
        yield "no [dp]", " and ".join(wanted)
        return
    if noise is not None and plan.noise < noise * (1 - _ROUNDING):
        yield f"dp noise {plan.noise:.4g}", wanted[0]
    if epsilon is not None:
        cost = plan.epsilon(plan.steps)
        if cost > epsilon * (1 + _ROUNDING) or plan.delta * rows >= 1:
            yield f"dp epsilon {cost:.4g}, delta {plan.delta:g}", wanted[-1]


def _of_model(
    terms: Terms,
    party: str,
    consent: Consent,
    split: Split,
    row_shape: Shape,
    own_bottom: bool,
    unaligned: int,
) -> Iterator[Difference]:
    """Check memory and parameters of a requested model; they are counted before it is built."""
    asked, train, rows = terms.parties[party], terms.train, most_rows(terms, split)
    codec, defense = compression.make(terms.codec), defenses.make(terms.defense)
    fitted = FIT_ROWS if defense.fit_epochs else 0

    def around(bottom: nn.Module) -> nn.Module:
        wrapped = defense.wrap_bottom(bottom, asked.width)
        adapter = codec.client_module(asked.width)
        return wrapped if adapter is None else nn.Sequential(wrapped, adapter)

    counted = footprint(
        _Given() if own_bottom else models.make_bottom(asked.bottom),
        row_shape,
        asked.width,
        batch_size=max(2, fitted, rows[Kind.CUT]),
        query_rows=max(1, rows[Kind.QUERY]),
        around=around,
    )
    named = [] if own_bottom else [f"bottom {asked.bottom}"]
    named += [f"defense {terms.defense}"] if terms.defense != "none" else []
    model = " and ".join([*named, f"codec {terms.codec}"])
    columns, width = math.prod(row_shape), max(asked.width, codec.wire_width(asked.width))
    needed = counted.inference_bytes() + _value_bytes(rows[Kind.QUERY] * width)
    if terms.mode == "train":
        copies = max(Optimization(train).copies, _FIT_COPIES if fitted else 0)
        copies += 0 if terms.dp is None else _DP_COPIES
        batch = counted.training_bytes(copies, train.in_flight)
        batch += _value_bytes(rows[Kind.CUT] * width)
        batch += defense.working_bytes(rows[Kind.CUT], columns, width)
        if defenses.uses(defense, "fit"):  # `fit` receives a copy of all training rows
            copies = 2 if unaligned else 1  # one more copy, with the unaligned rows at its end
            batch += 4 * (copies * len(split.train) + unaligned) * columns
        needed = max(needed, batch)
    yield from _of_size(consent, counted.parameters, needed, model)


def _own_layers(terms: Terms, party: str, row_shape: Shape) -> Layers | None:
    """Return the party's secret-shared layer, or None.

    The columns of other parties are not known yet. The layer has a column of ones in addition to
    the party's columns.
    """
    columns = dict.fromkeys(terms.feature_parties, 0) | {party: math.prod(row_shape) + 1}
    mode, width = secure_mode.make(terms.secure), terms.parties[party].width
    layers: Layers | None = mode.layers(columns, width, terms.label_party).get(party)
    return layers


def _of_layers(
    terms: Terms, consent: Consent, split: Split | None, shared: Layers | None
) -> Iterator[Difference]:
    """Check the memory for secret-shared layers, and for one exchange of shares."""
    if shared is None:
        return
    held, needed = shared.parameters, shared.memory_bytes(max(most_rows(terms, split).values()))
    yield from _above(consent, "max_parameters", held, f"shares of {held} parameters")
    memory = f"about {needed} bytes of memory for shares"
    yield from _above(consent, "max_memory_bytes", needed, memory)


def _value_bytes(values: int) -> int:
    return 4 * _NUMBERS_A_VALUE * values


class _Given(Bottom):
    """Placeholder for a bottom model from the party's own file; only its output is allocated."""

    def build(self, shape: Shape, width: int) -> nn.Module:
        return _Outputs(width)


class _Outputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        """Return zeros in place of a cut, axes (rows, width)."""
        return inputs.new_zeros(len(inputs), self.width)


def _epochs(terms: Terms, consent: Consent) -> list[Difference]:
    """Check the number of epochs of the training, plus those of a defense's earlier `fit`."""
    if terms.mode != "train":
        return []
    training, before = terms.train.epochs, defenses.make(terms.defense).fit_epochs
    more = (
        f" and {before} epochs before the training, in the fit of defense {terms.defense}"
        if before
        else ""
    )
    return list(_above(consent, "max_epochs", training + before, f"epochs {training}{more}"))


def _of_any_party(terms: Terms, party: str, consent: Consent) -> Iterator[Difference]:
    """Yield exceeded limits that exist for every party, with columns or without."""
    everybody = dict.fromkeys([*rules.peers(terms), *terms.tasks, terms.label_party])
    for name in everybody:
        if name != party and not any(fnmatchcase(name, one) for one in consent.members):
            yield f"party '{name}'", f"members {', '.join(consent.members) or 'no party'}"
    if terms.train.compile and not consent.compile:
        yield "compiled models", "compile = true"
    yield from _outside("mode", terms.mode, consent.modes)
    yield from _outside("purpose", terms.purpose, consent.purposes)
    if terms.mode == "train" and terms.train.warm_start is not None:
        yield from _outside("warm_start", terms.train.warm_start, consent.warm_starts)
    yield from _outside("secure", terms.secure, consent.secure)
    reads_cells = secure_mode.make(terms.secure).reads_cells
    yield from _outside("model", terms.secure if reads_cells else NETWORK, consent.models)
    parties, batch_size = len(terms.parties), terms.train.batch_size
    yield from _above(consent, "max_parties", parties, f"{parties} parties")
    if terms.mode == "train":
        yield from _above(consent, "max_batch_size", batch_size, f"batch_size {batch_size}")
    if terms.secure != "none" and not reads_cells:
        yield from _company(terms, consent)


def _of_plugins(terms: Terms, consent: Consent) -> Iterator[Difference]:
    """Check that the party accepts the codec, and every defense in a chain of defenses."""
    yield from _outside("codec", terms.codec, consent.codecs)
    for defense in parts(terms.defense):
        yield from _outside("defense", defense, consent.defenses)


def _of_rows(split: Split, consent: Consent) -> Iterator[Difference]:
    asked = sum(map(len, (split.train, split.validation, split.test)))
    yield from _above(consent, "max_rows", asked, f"{asked} rows")


def _company(terms: Terms, consent: Consent) -> Iterator[Difference]:
    """Check how many cuts are summed, because a sum of few cuts discloses more about each cut."""
    present, least = terms.feature_parties, consent.min_parties
    if least is None:  # with a dealer, the label party learns no single cut
        least = 2 if rules.dealer(terms) is None else 1
    if len(present) < least:
        yield f"{len(present)} feature parties", f"at least {least} in a secure mode"
    missing = [name for name in consent.parties if name not in present]
    if missing:
        yield f"no {', '.join(missing)}", f"{', '.join(consent.parties)} in a secure mode"


def _version(terms: Terms, consent: Consent) -> Iterator[Difference]:
    versions = consent.versions or (VERSION,)
    if terms.version not in versions:
        yield f"vfl {terms.version}", f"vfl in {', '.join(versions)}"


def _outside(setting: str, asked: str, allowed: Sequence[str]) -> Iterator[Difference]:
    """Yield a difference if none of the party's patterns matches the value of a setting."""
    if not any(fnmatchcase(asked, pattern) for pattern in allowed):
        yield f"{setting} {asked or 'not named'}", f"{setting} in {', '.join(allowed)}"


def _above(consent: Consent, limit: str, number: int, asked: str) -> Iterator[Difference]:
    """Yield a difference if a number exceeds the party's limit of this name."""
    most = getattr(consent, limit)
    if number > most:
        yield asked, f"{limit.removeprefix('max_')} <= {most}"


def _of_size(consent: Consent, parameters: int, memory: int, model: str) -> Iterator[Difference]:
    """Yield exceeded limits of a model's number of parameters and of its memory in bytes."""
    asked = f"{parameters} parameters in {model}"
    yield from _above(consent, "max_parameters", parameters, asked)
    asked = f"about {memory} bytes of memory for {model}"
    yield from _above(consent, "max_memory_bytes", memory, asked)


def most_rows(terms: Terms, split: Split | None) -> dict[Kind, int]:
    """Return the most rows of a training batch (key CUT) and of a query (key QUERY).

    Args:
        terms: the agreed terms.
        split: split of the rows; None at a dealer, which has no rows.
    """
    train, asked = terms.train.batch_size, QUERY_ROWS
    if split is not None:
        train = min(rules.batch_size(terms, len(split.train)), len(split.train))
        if (plan := PrivacyPlan.of(terms, len(split.train))) is not None:
            train = plan.most_rows
        asked = min(asked, max(len(split.validation), len(split.test)))
    return {Kind.CUT: train if terms.mode == "train" else 0, Kind.QUERY: asked}


def frame_limits(
    terms: Terms,
    party: str,
    split: Split | None,
    layers: Mapping[str, Layers] | None = None,
) -> LinkLimits:
    """Return the largest payloads in bytes on the stream between the label party and another party.

    Args:
        terms: the agreed terms.
        party: name of the other party, for example a feature party or a dealer.
        split: split of the rows; None at a dealer, which does not receive the row numbers.
        layers: first layers that each party secret-shares; None if the secure mode shares no
            layers. A feature party knows only its own layers. Until a feature party has received
            the other parties' layers, only the kinds of frames that come before these layers are
            allowed.
    """
    if terms.mode == "align":
        pieces = {Kind.PROTOCOL: PIECE_LIMIT_BYTES, Kind.ERROR: ANSWER_LIMIT_BYTES}
        return LinkLimits(pieces, pieces | {Kind.DONE: 0})
    rows = most_rows(terms, split)
    if terms.takers:
        own = limits_of_links(terms, party, split)
        merged = [_largest([getattr(one, way) for one in own]) for way in ("up", "down")]
        return LinkLimits(*map(_at_most_a_frame, merged))
    up, down = secure_mode.make(terms.secure).limits(terms, party, rows, layers)
    up |= {Kind.DONE: REPORT_LIMIT_BYTES, Kind.ERROR: ANSWER_LIMIT_BYTES}
    down |= {Kind.DONE: 0, Kind.ERROR: ANSWER_LIMIT_BYTES}
    if terms.mode == "serve":
        down[Kind.ASK], up[Kind.REFUSAL] = ROW_BYTES * rows[Kind.QUERY], REFUSAL_BYTES
    elif party != rules.dealer(terms):
        down[Kind.ACK] = _ANSWER_BYTES
    return LinkLimits(_at_most_a_frame(up), _at_most_a_frame(down))


def limits_of_links(terms: Terms, party: str, split: Split | None) -> list[LinkLimits]:
    """Return the largest payloads on a party's links, if the label party relays encrypted cuts.

    Args:
        terms: the agreed terms, which name the receivers of cuts.
        party: name of a feature party, or of a party that receives cuts.
        split: split of the rows.

    Returns:
        Limits of each link; the link to the label party is the first one.
    """
    middle = terms.middle
    rows = most_rows(terms, split)
    last = {Kind.DONE: REPORT_LIMIT_BYTES, Kind.ERROR: ANSWER_LIMIT_BYTES}
    words = LinkLimits(last, {Kind.DONE: 0, Kind.ERROR: ANSWER_LIMIT_BYTES})

    def cuts(codec: Codec, width: int, more: int) -> tuple[dict[Kind, int], dict[Kind, int]]:
        width = codec.wire_width(width)
        forward = {kind: codec.payload_limit(count, width) + more for kind, count in rows.items()}
        back = {Kind.GRAD: forward[Kind.CUT], Kind.ACK: _ANSWER_BYTES + more}
        # a middle party also forwards a refusal, followed by the refusing party's name
        if terms.mode == "serve":
            longest = max(len(name.encode()) for name in terms.feature_parties)
            forward[Kind.REFUSAL] = REFUSAL_BYTES + more + (0 if more else longest)
            back = {Kind.ASK: ROW_BYTES * rows[Kind.QUERY] + more, Kind.DONE: more}
        return forward, back

    def sealed(name: str) -> tuple[dict[Kind, int], dict[Kind, int]]:
        forward, back = cuts(compression.make(terms.codec), terms.parties[name].width, TAG_BYTES)
        return forward | {Kind.PROTOCOL: OFFER_BYTES}, back | {Kind.PROTOCOL: OFFER_BYTES}

    def beside(forward: Mapping[Kind, int], back: Mapping[Kind, int]) -> LinkLimits:
        return LinkLimits({**words.up, **forward}, {**words.down, **back})

    theirs = [LinkLimits(*reversed(sealed(name))) for name in terms.feature_parties]
    if party in terms.feature_parties:
        own = words
        if middle is None:
            own = beside(*cuts(compression.make(terms.codec), terms.parties[party].width, 0))
        return [own, *(LinkLimits(*sealed(party)) for _ in terms.takers)]
    if middle is None:
        return [words, *theirs]
    return [beside(*cuts(compression.make(middle.codec), middle.width, 0)), *theirs]


def _largest(limits: Iterable[Mapping[Kind, int]]) -> dict[Kind, int]:
    """Return, for each kind of frame, the largest of several limits."""
    most: dict[Kind, int] = {}
    for kind, size in (pair for one in limits for pair in one.items()):
        most[kind] = max(size, most.get(kind, 0))
    return most


def most_of_an_epoch(terms: Terms, split: Split, limits: Sequence[LinkLimits]) -> Spent:
    """Return the most bytes of one epoch's exchanges, or of all exchanges without training.

    Args:
        terms: the agreed terms.
        split: split of the rows.
        limits: limits of all the party's streams.
    """
    asked = [split.test]
    trains = 0
    if terms.mode == "train":
        asked.append(split.validation)
        trains = rules.steps_per_epoch(terms, len(split.train))
        if (plan := PrivacyPlan.of(terms, len(split.train))) is not None:
            trains = plan.a_epoch
    queries = sum(math.ceil(len(rows) / QUERY_ROWS) for rows in asked)
    trained = len(split.train)
    # a Poisson-sampled batch exceeds this number of rows with probability e^-70
    if terms.dp is not None:
        trained += math.ceil(12 * math.sqrt(trained)) + 60
    rows = sum(map(len, asked)) + (trained if trains else 0)

    def most(payloads: Mapping[Kind, int]) -> int:
        return sum(
            times * sum(payloads.get(kind, 0) + HEADER_BYTES for kind in kinds)
            for times, kinds in ((trains, _TRAINING), (queries, _ASKING))
        )

    return Spent(
        rows=rows,
        bytes_up=sum(most(one.up) for one in limits),
        bytes_down=sum(most(one.down) for one in limits),
    )


def _at_most_a_frame(limits: Mapping[Kind, int]) -> dict[Kind, int]:
    return {kind: min(most, LIMIT_BYTES) for kind, most in limits.items()}
