"""Privacy budget that trainings with noise have spent of a worker's tables, on its disk."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from vfl.config.toml import Settings
from vfl.core.errors import ConsentError, UserError
from vfl.privacy.accountants import GaussianSteps
from vfl.session.store.spending import Spending

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
#: Most kinds of steps, by noise and rate, that a budget counts separately.
MOST_KINDS = 32
#: Larger than any grant: spending that a restored store may have lost.
_ALL_EPSILON = 1e9


class Steps(Settings):
    """Steps of one kind; see `GaussianSteps`."""

    noise: float = Field(gt=0, le=1e6)
    steps: int = Field(gt=0, le=1 << 40)
    sampling_rate: float = Field(gt=0, le=1)


class Table(Settings):
    """A table of a worker.

    Attributes:
        run: name under which a leader finds the table.
        spent: steps that were taken, or may have been taken before the worker was killed.
    """

    run: str
    spent: tuple[Steps, ...] = Field(default=(), max_length=MOST_KINDS)

    @property
    def spent_epsilon(self) -> float | None:
        """None, because steps of several kinds do not add up; see `Budget`."""
        return None


class BudgetLedger(Spending[Table]):
    """Budgets of one worker's tables; they persist when the process ends.

    A table is identified by its name: A changed file under the same name has the same budget.
    """

    kind, form = "privacy of a worker's tables", Table
    restored_by = "vfl worker TICKET --store FOLDER --restored"

    def spent(self, name: str) -> list[GaussianSteps]:
        """Return the steps taken on a table.

        Raises:
            UserError: the name cannot be used as a file name.
            RunFolderError: the ledger's file is damaged.
            ConsentError: the store was restored from a copy, so the spent budget is unknown.
        """
        if self.witness.read().lost_epsilon:
            raise ConsentError(
                "the spent budget of a worker's tables is no longer known",
                where=str(self.folder),
                got="a store that was restored from a copy",
                fix="omit --epsilon; docs/backups.md explains the cost of a lost store",
            )
        if not _NAME.fullmatch(name):
            raise UserError(
                "a table whose budget is kept needs another name", got=name, want=_NAME.pattern
            )
        kept = self._read(name)
        taken = () if kept is None else kept.spent
        return [GaussianSteps(one.noise, one.steps, one.sampling_rate) for one in taken]

    def restored(self) -> None:
        """Record that the store was restored from a copy; it then grants no budget any more."""
        self.witness.restored(_ALL_EPSILON)

    def keep(self, name: str, spent: Sequence[GaussianSteps]) -> None:
        """Write steps to the disk."""
        kinds = [
            Steps(noise=one.noise, steps=one.steps, sampling_rate=one.sampling_rate)
            for one in spent
            if one.steps
        ]
        self._write(Table(run=name, spent=tuple(kinds)))
