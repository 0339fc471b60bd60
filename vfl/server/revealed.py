"""Who learned what of whom in a session: the leakage ledger of the run's card.

Kinds and sizes only, which the terms and the counts of the session give. Numbers under masks are
left out: they tell nothing to whoever does not collude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vfl.exchange.exposure import ring_of, shares_weights
from vfl.exchange.neighbours import partner_of
from vfl.server.progress import Progress
from vfl.session import Terms

SETUP, TRAIN, EVALUATE = "setup", "train", "evaluate"


@dataclass(frozen=True, slots=True)
class Revealed:
    """One kind of thing that one party learned in one phase, in clear.

    Attributes:
        observer: who learned it.
        what: "cut", "sum of the cuts" or "gradient of the sum", for example.
        of: the party it tells of, or "all" whose cuts were summed.
        phase: "setup", "train" or "evaluate".
        times: in how many exchanges.
        values: how many numbers, all times together.
    """

    observer: str
    what: str
    of: str
    phase: str
    times: int
    values: int


def revealed(terms: Terms, progress: Progress) -> list[Revealed]:
    """Everything that was told in a training or evaluation beside what all agreed on before.

    Raises:
        SpecError, ExposedCutError: the secure mode cannot be built; see `ring_of`.
    """
    found = list(_sizes(terms)) if shares_weights(terms) else []
    phases = (
        (TRAIN, progress.train_steps, progress.train_rows),
        (EVALUATE, progress.asked_steps, progress.asked_rows),
    )
    for phase, times, rows in phases:
        if times:
            found += _of_phase(terms, phase, times, rows)
    epochs = len(progress.history)
    if terms.mode == "train" and (terms.train.patience or terms.train.keep == "best"):
        found += [
            Revealed(name, "whether an epoch is the best or the last", terms.label_party, EVALUATE,
                     epochs, epochs)
            for name in terms.feature_parties
        ]  # fmt: skip
    return found


def _sizes(terms: Terms) -> Iterator[Revealed]:
    """How many columns a shared layer has, which its holders and the dealer must know."""
    order = tuple(terms.feature_parties)
    for name in order:
        other = terms.dealer or partner_of(name, order)
        for observer in (terms.label_party, other):
            yield Revealed(observer, "number of columns", name, SETUP, 1, 1)


def _of_phase(terms: Terms, phase: str, times: int, rows: int) -> Iterator[Revealed]:
    label, order = terms.label_party, terms.feature_parties
    values = {name: rows * terms.parties[name].width for name in order}
    if ring_of(terms) is None:
        cut, gradient = "cut", "gradient of its cut"
        if terms.codec != "none":
            cut, gradient = f"{cut} ({terms.codec})", f"{gradient} ({terms.codec})"
        for name in order:
            yield Revealed(label, cut, name, phase, times, values[name])
    else:
        gradient = "gradient of the sum"
        what = "outputs of the first layers" if shares_weights(terms) else "cuts"
        of, what = (order[0], what) if len(order) == 1 else ("all", f"sum of the {what}")
        yield Revealed(label, what, of, phase, times, values[order[0]])
    if phase == TRAIN and not shares_weights(terms):
        for name in order:
            yield Revealed(name, gradient, label, phase, times, values[name])
    if terms.dealer is not None:
        yield Revealed(terms.dealer, "rows of an exchange", "all", phase, times, times)
