"""Results at a glance: four cards (single numbers) and one sentence of a study's page.

Two cards show the score of the model's predictions, and the sent bytes. The card of attacks on
labels shows the best attack's gain over the baseline without the model; the card of attacks on
columns shows the best attack's success beside the guess. If attacks were not run, their cards show
the command that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from vfl.config import CompareSettings, GridSettings
from vfl.config.grid import LabelMeasure
from vfl.experiments.cells import HONEST
from vfl.experiments.leaderboard import (
    UNDEFENDED,
    LeaderboardEntry,
    Standing,
    fitting_measure,
    label_measure,
    leaderboard,
    mean_of,
    utility_of,
)
from vfl.experiments.results import LOWER_IS_BETTER, TRAINING, Line, Record, grouped
from vfl.experiments.tables import (
    MEASURES,
    NOT_MEASURED,
    SHARES,
    bytes_text,
    estimate_text,
    percent_text,
    score_text,
    seconds_text,
    three_digits,
)


@dataclass(frozen=True, slots=True)
class Card:
    """One number at the top of a page, with a title and a note."""

    title: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Glance:
    """The summary at the top of a page.

    Attributes:
        cards: four cards: quality of predictions, traffic, attacks on labels, attacks on columns.
        sentence: one sentence that sums up the cards.
        details: sentences with the evidence and the assumptions behind the cards.
    """

    cards: Sequence[Card]
    sentence: str
    details: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """Summary of attacks on labels or on columns: a card, a clause, and detail sentences."""

    card: Card
    short: str
    details: str = ""


def of_run(
    utility: Card,
    traffic: Card,
    promises: str,
    rows: Sequence[Record],
    alone: str = "",
    took: str = "",
) -> Glance:
    """Return the summary of a run, with the results of attacks on it.

    Args:
        utility: card of the quality of the model's predictions.
        traffic: card of the run's traffic (sent bytes).
        promises: the run's differential privacy statements as text; empty if there are none.
        rows: results of attacks on the run; empty if there were no attacks.
        alone: text with the run's gain over models of single parties; empty if that gain was not
            measured.
        took: text with the duration of the run; empty if the duration was not measured.
    """
    labels, columns = _labels_of(rows), _columns_of(rows)
    gained = f" ({alone})" if alone else ""
    privacy = f"The run promises {promises or 'no differential privacy'}."
    sentence = (
        f"{utility.title} {utility.value}{gained}, {traffic.value} sent{took and f' in {took}'}; "
        f"{labels.short}; {columns.short}. {privacy}"
    )
    cards = [utility, traffic, labels.card, columns.card]
    return Glance(cards, sentence, list(filter(None, (labels.details, columns.details))))


def of_grid(
    rows: Sequence[Record],
    settings: GridSettings,
    alone: Callable[[str, Mapping[str, float]], str] = lambda measure, reached: "",
) -> Glance:
    """Return a grid's summary: the undefended model, and the best defense within the margin.

    Args:
        rows: result records of all victims.
        settings: settings of the grid.
        alone: function that returns a training's gains over models of single parties; see
            `gains_over_alone`.
    """
    measure = fitting_measure(rows, settings.measure)
    entries = leaderboard(rows, settings.margin, measure)
    columns = _columns_of([row for row in rows if row.training == UNDEFENDED])
    if not entries:
        unknown = Card("Labels", NOT_MEASURED, "no attack on labels")
        cards = [Card("Utility", NOT_MEASURED), _cost_card(rows), unknown, columns.card]
        return Glance(cards, f"Labels were not attacked; {columns.short}.", [columns.details])
    plain = next((one for one in entries if one.defense == UNDEFENDED), entries[0])
    best = _best(entries)
    good = MEASURES[plain.judged_by]
    gained = alone(plain.judged_by, utility_of(rows, plain.judged_by, plain.defense))
    note = "undefended"
    if best.difference is not None:
        note += f"; {best.defense} {estimate_text(best.difference, '+', '')} points"
    cards = [
        Card(f"Test {good}", estimate_text(plain.utility), note),
        _cost_card(rows),
        Card(
            "Label inference, points over the model-free baseline",
            _above(plain.worst),
            "undefended" + ("" if best is plain else f"; {best.defense} {_above(best.worst)}"),
        ),
        columns.card,
    ]
    attacks = len({row.attacker for row in rows if label_measure(row) == measure})
    sentence = (
        f"Test {good} {cards[0].value}{gained and f' ({gained})'}, "
        f"{cards[1].value} {cards[1].note}; "
        f"undefended, {verdict_words(plain.worst)} ({_gained(plain.worst, measure)})"
    )
    details = [_attack_sentence("Without a defense", plain, measure, attacks)]
    if best is not plain:
        price = "" if best.difference is None else estimate_text(best.difference, "+", "")
        sentence += (
            f"; with {best.defense} it is {_above(best.worst)}, at {price} points of test {good}"
        )
        details.append(_attack_sentence(f"With {best.defense}", best, measure, attacks))
        details.append(_price_sentence(best, good, settings.margin))
    details += [columns.details, _assumes(settings)]
    return Glance(cards, f"{sentence}; {columns.short}.", list(filter(None, details)))


def of_comparison(
    settings: CompareSettings,
    lines: Sequence[Line],
    measure: str,
    alone: Callable[[str, Mapping[str, float]], str] = lambda measure, reached: "",
) -> Glance:
    """Return a comparison's summary: the reference, and the codec with the fewest bytes.

    Only codecs that are not shown to be worse than the reference count.

    "Not shown to be worse" does not mean "as good", because few repeats are weak evidence; the text
    states how large the difference may be.

    Args:
        settings: settings of the comparison.
        lines: results of each codec.
        measure: metric by which the comparison ranks codecs.
        alone: function that returns a training's gains over models of single parties; see
            `gains_over_alone`.
    """
    reference = next((one for one in lines if one.about["method"] == settings.reference), None)
    known = [one for one in lines if one.values(measure)]
    if reference is None or reference not in known:
        return Glance([Card("Utility", NOT_MEASURED), Card("On the wire", NOT_MEASURED)], "")
    word = MEASURES.get(measure, measure.replace("_", " "))
    name = reference.about["codec"]
    small = min(
        (one for one in known if one is reference or _not_worse(one, measure)),
        key=lambda one: one.sent_percent,
    )
    cards = [
        Card(f"Test {word}", score_text(reference.over(measure), measure), name),
        Card(
            "Smallest not shown to be worse",
            f"{small.sent_percent:.2f} %",
            f"of dense float32, {small.about['codec']}",
        ),
        Card("Labels", NOT_MEASURED, "vfl grid attacks these codecs"),
        Card("Columns", NOT_MEASURED, "vfl grid --attack columns"),
    ]
    if small is reference:
        less_sent = [one for one in known if one.sent_percent < reference.sent_percent]
        differences = [one.difference(measure) for one in less_sent]
        decided = all(one and one.half_width is not None for one in differences)
        found = (
            f"Every codec that sends less than {name} is worse."
            if less_sent and decided
            else f"With one repeat, no codec is shown to be as good as {name}."
            if less_sent
            else f"No codec sends less than {name}."
        )
    else:
        less = score_text(small.difference(measure), measure, "+")
        unit = " points" if measure in SHARES else ""
        found = (
            f"{small.about['codec']} sends {small.sent_percent:.2f} % of dense float32 and reaches "
            f"{score_text(small.over(measure), measure)}, {less}{unit} relative to {name}: "
            "it is not shown to be worse."
        )
    gained = alone(measure, reference.values(measure))
    best = f"With {name} the test {word} is {cards[0].value}{gained and f' ({gained})'}. "
    return Glance(cards, best + found, ["The leakage of cuts and gradients was not measured here."])


def _not_worse(one: Line, measure: str) -> bool:
    """Return whether the 95 % interval of a codec's gain over the reference reaches 0 or more."""
    less = one.difference(measure)
    if less is None or less.half_width is None:
        return False
    return less.low <= 0 if measure in LOWER_IS_BETTER else less.high >= 0


def _labels_of(rows: Sequence[Record]) -> _Part:
    """Return the summary of the label attack with the largest gain over the model-free baseline."""
    measure = fitting_measure(rows, "auto")
    entries = leaderboard(rows, 0.5, measure)
    if not entries:
        card = Card("Labels", NOT_MEASURED, "vfl attack RUN")
        return _Part(card, "labels were not attacked")
    worst = entries[0].worst
    attacks = len({row.attacker for row in rows if label_measure(row) == measure})
    value = _above(worst)
    mine = [row for row in rows if (row.attacker, label_measure(row)) == (worst.attack, measure)]
    draws = len({row.draw for row in mine if row.k in (0, worst.k)})
    over = f", mean of {draws} draws" if draws > 1 else ""
    card = Card(
        "Label inference, points over the model-free baseline",
        value,
        f"{worst.attack}{over}; one victim is not enough for a verdict",
    )
    short = f"the best attack on labels gains {_gained(worst, measure)}"
    return _Part(card, short, _attack_sentence("On this run", entries[0], measure, attacks))


def _attack_sentence(
    where: str, entry: LeaderboardEntry, measure: LabelMeasure, attacks: int
) -> str:
    """Return a sentence with the worst attack's score, the guess, the baseline and the verdict."""
    worst = entry.worst
    each = "" if measure == "r2" else " of each class"
    leaked = f"{worst.k} leaked labels{each}" if worst.k else "no leaked label"
    over_guess = 100 * (worst.value.mean - worst.guess.mean)
    name = (
        f"the strongest of {attacks} attacks ({worst.attack}"
        if attacks > 1
        else (f"the attack ({worst.attack}")
    )
    return (
        f"{where} {name}, {leaked}) infers labels with {MEASURES[measure]} "
        f"{estimate_text(worst.value)}: {over_guess:+.1f} points over the guess, and "
        f"{estimate_text(worst.advantage, '+', '')} over the best attack without the model: "
        f"{verdict_words(worst)}{_more_words(worst)}."
    )


def verdict_words(one: Standing) -> str:
    """Return the verdict about a defense as a clause."""
    if one.verdict == "protected":
        return "no attack that was run gains from having the model"
    if one.verdict == "leaks":
        return "the model discloses labels"
    count = one.advantage.count
    victims = "one victim leaves" if count == 1 else f"{count} victims leave"
    return f"{victims} it undecided whether the model discloses labels"


def _more_words(one: Standing) -> str:
    """Return the verdict for a margin of one point, or the number of victims it needs."""
    if one.verdict in ("protected", "leaks") or one.judged.verdict == "easier":
        return ""
    if one.judged.verdict == "undecided" and one.judged.more is None:
        return ""
    if one.judged.verdict == "undecided":
        return (
            f"; with {one.judged.more} more victims the verdict would be decided, "
            "where differences below one point do not count"
        )
    return f"; labels are {one.judged.sentence}"


def _best(entries: Sequence[LeaderboardEntry]) -> LeaderboardEntry:
    """Return the best protected entry among defenses not shown to cost more than the margin."""
    return next((one for one in entries if one.affordable != "no"), entries[0])


def _gained(one: Standing, measure: LabelMeasure) -> str:
    """Return the worst attack's gain over the guess, and over the baseline without the model."""
    over_guess = 100 * (one.value.mean - one.guess.mean)
    return (
        f"{over_guess:+.1f} points of {MEASURES[measure]} over the guess, "
        f"{_above(one)} over attacks without the model"
    )


def _above(one: Standing) -> str:
    return estimate_text(one.advantage, "+", "")


def _price_sentence(best: LeaderboardEntry, good: str, margin: float) -> str:
    if best.difference is None:
        return ""
    answers = {
        "yes": f"the loss is at most {margin:g} points",
        "no": f"the loss is more than {margin:g} points",
        "undecided": f"whether the loss is at most {margin:g} points is undecided",
    }
    return (
        f"Its {good} is {estimate_text(best.utility)}, "
        f"{estimate_text(best.difference, '+', '')} points relative to the undefended model: "
        f"{answers[best.affordable or 'undecided']}."
    )


def _assumes(settings: GridSettings) -> str:
    owner = "given by an owner who trained the whole model"
    trained = "its own" if settings.trained_by == "split" else owner
    return (
        f"This holds for the attacks that were run, for an attacker with a bottom model that is "
        f"{trained} and at most {max(settings.leaks)} leaked labels of each class."
    )


_OF_COLUMNS = ("mse", "token_accuracy", "attribute_auc")


def _columns_of(rows: Sequence[Record]) -> _Part:
    """Return the summary of the attack on columns that gains most over the guess."""
    of_columns = (row for row in rows if row.measure in _OF_COLUMNS)
    found = grouped(of_columns, "attacker", "measure")
    if not found:
        card = Card("Columns", NOT_MEASURED, "vfl attack RUN --attack columns")
        return _Part(card, "columns were not attacked")

    def gain(own: Sequence[Record]) -> float:
        """Return the share of the guess's error that attacks remove, or points above the guess."""
        value, guess = _mean(own, "value"), _mean(own, "guess")
        return 1 - value / guess if own[0].measure == "mse" and guess else value - guess

    (attack, measure), own = max(found.items(), key=lambda one: gain(one[1]))
    value, guess = _mean(own, "value"), _mean(own, "guess")
    if measure == "mse":
        card = Card(
            "Columns, error explained",
            percent_text(max(0.0, gain(own))),
            f"{attack}; guessing each column's mean explains 0 %",
        )
        words = (
            f"The best attack on columns ({attack}) has a squared error of {three_digits(value)}; "
            f"guessing each column's mean has {three_digits(guess)}."
        )
        return _Part(card, f"the best attack on columns explains {card.value} of them", words)
    word = "words" if measure == "token_accuracy" else "an attribute"
    card = Card(
        f"Columns, {word}", percent_text(value), f"{attack}; the guess {percent_text(guess)}"
    )
    words = (
        f"The best attack on columns ({attack}) infers {word} with {percent_text(value)}; "
        f"the guess reaches {percent_text(guess)}."
    )
    return _Part(card, f"the best attack on columns infers {word} with {card.value}", words)


def _mean(rows: Sequence[Record], name: str) -> float:
    return mean_of({(row.repeat, row.draw): getattr(row, name) for row in rows})


def _cost_card(records: Sequence[Record]) -> Card:
    """Return the card with the traffic of an undefended training, as a mean over seeds."""
    plain = [
        one
        for one in records
        if (one.subject, one.training, one.adversary) == (TRAINING, UNDEFENDED, HONEST)
    ]
    sent, took = ([one.value for one in plain if one.measure == name] for name in _TOOK)
    if not sent:
        return Card("On the wire", NOT_MEASURED)
    words = f"in {seconds_text(fmean(took))} a training"
    return Card("On the wire", bytes_text(fmean(sent)), words)


_TOOK = ("bytes", "seconds")
