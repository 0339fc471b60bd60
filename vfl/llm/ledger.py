"""Ledger of the questions that a model owner has answered with its weights; it enforces limits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pydantic import Field

from vfl.config.toml import Settings
from vfl.core.storage import read_lines
from vfl.session.store.spending import Spending

if TYPE_CHECKING:
    from vfl.config.party_file import PartyFile
    from vfl.llm.file import LlmFile, LlmLimits

_HOUR_S = 3600.0
#: Number of answered texts with which no question is left; `max_questions` is always smaller.
_ALL = 2**31
#: File beside the ledger in which an earlier version of vfl wrote one line for each answer.
_FORMER = "asked.jsonl"


class Questions(Settings):
    """Counts of the questions that the owner has answered with one set of weights.

    Attributes:
        run: SHA-256 digest of the weights.
        texts: number of texts answered so far.
        recent: times of the answers of the last hour, each with the number of texts in the answered
            batch.
    """

    run: str = Field(pattern=r"^[0-9a-f]{64}$")
    texts: int = Field(default=0, ge=0)
    recent: tuple[tuple[float, int], ...] = ()

    @property
    def spent_epsilon(self) -> float | None:
        """None, because a question has no stated epsilon."""
        return None


class QuestionLedger(Spending[Questions]):
    """Ledger of answered questions, by set of weights.

    Only the ledger of the model owner has entries.
    """

    kind, form, restored_by = "questions about weights", Questions, "vfl llm restored FOLDER"

    def require(self, weights: str, texts: int, limits: LlmLimits) -> None:
        """Refuse to answer `texts` more questions if that would exceed a limit.

        Raises:
            ConsentError: answering would exceed a limit.
        """
        known = self._asked(weights)
        recent = sum(count for _, count in known.recent)
        limits.require(max_questions=known.texts + texts, questions_per_hour=recent + texts)

    def count(self, weights: str, texts: int) -> None:
        """Record `texts` more answered questions on disk."""
        known = self._asked(weights)
        recent = (*known.recent, (time.time(), texts))
        self._write(Questions(run=weights, texts=known.texts + texts, recent=recent))

    def give_up(self) -> None:
        """See `Spending.give_up`."""
        for entry in self.entries():
            self._write(entry.model_copy(update={"texts": _ALL}))

    def _asked(self, weights: str) -> Questions:
        """Return the entry for a set of weights, with the times of the last hour's answers only."""
        known, hour = self._read(weights), time.time() - _HOUR_S
        if known is None:
            path = self._store / _FORMER
            lines = read_lines(path) if path.exists() else ()
            before = [
                (one["at"], one.get("texts", 1)) for one in lines if one["weights"] == weights
            ]
            texts = sum(count for _, count in before)
            known = Questions(run=weights, texts=texts, recent=tuple(before))
        recent = tuple(one for one in known.recent if one[0] > hour)
        return known.model_copy(update={"recent": recent})


def questions_of(file: PartyFile | LlmFile) -> QuestionLedger:
    """Return the ledger, in a party's store, of the questions that the party has answered."""
    store = file.store_path
    return QuestionLedger(store / "questions" / file.party, file.party, store)
