"""A party's own rows and nobody else's: those of the experiment, or new ones to predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vfl.config import Experiment
from vfl.core.errors import BadOptionError, ConfigError, TooFewRowsError, nearest
from vfl.datasets import PartyData, load_for_prediction
from vfl.training.run import load_party, table_form
from vfl.triple.kept import Kept
from vfl.triple.plan import Terms, helps, seats


def own_rows(experiment: Experiment, kept: Kept, role: int, rows: str = "") -> PartyData | None:
    """What a party brings into a training, an inference or a prediction; None for a helper.

    Args:
        experiment: where its rows are, and how they are written.
        kept: its terms, and for a prediction what it kept of the training.
        role: 0, 1 or 2.
        rows: for a prediction, its table of new rows.

    Raises:
        ConfigError: the experiment is not of these parties.
        BadOptionError: a helper was given rows.
        TooFewRowsError: a table without rows.
        DataError: see `vfl.datasets`.
    """
    parties, terms = seats(experiment), kept.terms
    if parties != terms.parties or parties[terms.label_role] != experiment.label.party:
        raise ConfigError(
            "the experiment is of other parties than the training was",
            where="parties",
            got=", ".join(parties),
            want=", ".join(terms.parties),
            fix="give the experiment that was trained",
        )
    if helps(terms, role):
        if rows:
            raise BadOptionError(
                "this party has no rows",
                where="--rows",
                got=rows,
                want=f"nothing: {parties[role]} only helps, and follows what the others ask",
            )
        return None
    if terms.task != "predict":
        return load_party(experiment, parties[role])
    own = load_for_prediction(
        parties[role], rows, experiment.data.id, kept.encoder, table_form(experiment)
    )
    if not own.rows:
        raise TooFewRowsError("there is nothing to predict", where=rows, got="0 rows", want="1")
    return replace(own, classes=kept.classes)


def new_rows(experiment: Experiment, terms: Terms, given: Path | Mapping[str, Path]) -> list[str]:
    """Each role's table of new rows, "" for a helper.

    Args:
        experiment: that was trained.
        terms: of the training.
        given: one table for all, or each party's own.

    Raises:
        BadOptionError: a party that is not there, one that has no table, or tables of their own
            whose rows no id joins.
    """
    if isinstance(given, Mapping) and experiment.data.id is None:
        raise BadOptionError(
            "nothing tells which rows of these tables belong together",
            where="--rows",
            got=", ".join(given),
            want="one table for all, for 'data.id' is not set",
        )
    names = [name for role, name in enumerate(terms.parties) if not helps(terms, role)]
    each = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    unknown = [name for name in each if name not in names]
    missing = [name for name in names if name not in each]
    if unknown or missing:
        raise BadOptionError(
            "the tables of new rows are not those of the parties",
            where="--rows",
            got=", ".join(each) or "none",
            want=f"one of {', '.join(names)} each",
            fix=nearest(unknown[0], names) if unknown else f"--rows {missing[0]}=FILE",
        )
    return [str(each[name]) if name in each else "" for name in terms.parties]
