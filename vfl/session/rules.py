"""Functions of a session's terms: which parties take part, and which exchanges the session has.

The module `vfl.session.terms` defines the terms, and does not import this module. The rules of
secure modes and of `[dp]` are in other modules, which this module calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

import numpy as np

from vfl import compression, defenses
from vfl.compression import Codec
from vfl.core.errors import ConfigError
from vfl.datasets import Split
from vfl.defenses.base import Undefended
from vfl.session import secure_mode
from vfl.session.dp_plan import PrivacyPlan
from vfl.session.schedule import Exchange, asking, shuffled_in_blocks, starting, training
from vfl.session.schedule import steps_per_epoch as steps_of
from vfl.session.terms import Terms


def dealer(terms: Terms) -> str | None:
    """Return the name of the dealer, a third party; None if the session has no dealer."""
    mode = secure_mode.make(terms.secure)
    if mode.helps_to_train and terms.mode != "train":
        return None
    return mode.third_party(terms.label_party)


def rowless(terms: Terms) -> str | None:
    """Return the name of the party without rows (dealer or middle party).

    The result is None if the session has neither.
    """
    return dealer(terms) if terms.middle is None else terms.middle.party


def peers(terms: Terms) -> list[str]:
    """Return the parties to which the label party has a stream.

    These are the feature parties, a dealer or middle party, and further label parties; in a
    service, only the further label parties that serve.
    """
    third = [] if (name := rowless(terms)) is None else [name]
    further = terms.serving if terms.mode == "serve" else terms.tasks
    return [*terms.feature_parties, *third, *further]


def window_frames(terms: Terms) -> int:
    """Return the largest number of unread frames in transit, in one direction of a stream."""
    pairs = 1
    if terms.takers:
        pairs += max(len(terms.feature_parties), len(terms.takers))
    return pairs * secure_mode.make(terms.secure).window_frames(terms.train)


def schedule(terms: Terms, split: Split, start: int = 0) -> Iterator[Exchange]:
    """Yield the session's exchanges over the rows of this split, from the exchange `start` on."""
    return starting(_exchanges(terms, split), start)


def in_flight_at(terms: Terms, split: Split, step: int) -> Iterator[Exchange]:
    """Yield the exchanges before `step` for which gradients may still be in transit at `step`."""
    earlier = schedule(terms, split, max(0, step - terms.train.in_flight))
    return takewhile(lambda exchange: exchange.step < step, earlier)


def _exchanges(terms: Terms, split: Split) -> Iterator[Exchange]:
    if terms.mode == "train":
        plan = PrivacyPlan.of(terms, len(split.train))
        return training(
            terms.seed,
            terms.train.epochs if plan is None else plan.epochs,
            _batches(terms, split.train) if plan is None else plan.batches(terms, split.train),
            split.train,
            split.validation,
            split.test,
            1 if secure_mode.make(terms.secure).whole_epochs else terms.train.checkpoint_every,
        )
    return asking("test" if terms.mode == "evaluate" else "predict", split.test)


def batch_size(terms: Terms, rows: int) -> int:
    """Return the number of rows in a training batch, given the number of training rows."""
    if secure_mode.make(terms.secure).whole_epochs:
        return max(1, rows)
    return terms.train.batch_size


def steps_per_epoch(terms: Terms, rows: int) -> int:
    """Return the number of training exchanges per epoch, given the number of training rows."""
    return steps_of(rows, batch_size(terms, rows))


def _batches(terms: Terms, rows: np.ndarray) -> int | Callable[[int], Iterable[np.ndarray]]:
    if secure_mode.make(terms.secure).whole_epochs:
        return lambda epoch: [rows]
    if terms.train.shuffle == "full":
        return batch_size(terms, len(rows))
    return lambda epoch: shuffled_in_blocks(terms.seed, epoch, terms.train, rows)


def refuse_ranks(terms: Terms, split: Split, size: int) -> None:
    """Refuse a training that several ranks would do differently from one rank.

    Args:
        terms: terms of the session.
        split: split of the party's rows.
        size: number of ranks.

    Raises:
        ConfigError: a setting does not allow several ranks; the error names the setting.
    """
    codec, defense = compression.make(terms.codec), defenses.make(terms.defense)
    epoch = takewhile(lambda one: one.epoch == 1 and one.trains, schedule(terms, split))
    smallest = min((len(one.rows) for one in epoch), default=size)
    for stands, where, got, why in (
        (terms.mode != "train", "mode", terms.mode, "only a training has several ranks"),
        (terms.dp is not None, "dp", "DP-SGD", "noise is drawn for whole batches"),
        (terms.secure != "none", "secure", terms.secure, "the cuts of whole batches are masked"),
        (not isinstance(defense, Undefended), "defense", terms.defense,
         "a defense draws random numbers for whole batches, or reads whole batches"),
        (not _rows_apart(codec), "codec", terms.codec,
         "this codec draws random numbers, has trained weights, or uses one scale for a batch"),
        (terms.train.in_flight > 1, "train.in_flight", str(terms.train.in_flight),
         "a checkpoint of rank 0 would lack the in-flight frames of other ranks"),
        (terms.train.compile, "train.compile", "true", "a compiled model cannot use other ranks"),
        (terms.middle is not None, "middle", "a party in the middle", "it has one rank"),
        (bool(terms.tasks), "tasks", "further label parties", "they have one rank each"),
        (terms.missing_rows != "intersection", "data.missing_rows", terms.missing_rows,
         "one rank's part of a batch may contain none of a party's rows"),
        (smallest < size, "train.batch_size", f"a batch of {smallest} rows",
         "every rank needs a row of every batch"),
    ):  # fmt: skip
        if stands:
            raise ConfigError(
                f"{size} ranks would not train like one rank: {why}",
                where=where,
                got=got,
                fix="set one rank at every party, or change this setting",
            )


def _rows_apart(codec: Codec) -> bool:
    adds_loss = type(codec).local_loss is not compression.Codec.local_loss
    return codec.rows_apart and not (codec.draws or codec.learns or adds_loss)
