"""What trainings with noise have spent of a worker's tables, on its disk."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from vfl.config.toml import Settings
from vfl.core.errors import ConsentError, UserError
from vfl.privacy.accountants import GaussianSteps
from vfl.session.store.spending import Spending

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
#: Kinds of steps, by noise and rate, that a budget counts apart.
MOST_KINDS = 32
#: More than any grant: what a store that was put back may have forgotten.
_ALL_EPSILON = 1e9


class Steps(Settings):
    """Steps of one kind; see `GaussianSteps`."""

    noise: float = Field(gt=0, le=1e6)
    steps: int = Field(gt=0, le=1 << 40)
    sampling_rate: float = Field(gt=0, le=1)


class Table(Settings):
    """A table of a worker.

    Attributes:
        run: the name by which a leader finds it.
        spent: the steps that were taken, or may have been before the worker was killed.
    """

    run: str
    spent: tuple[Steps, ...] = Field(default=(), max_length=MOST_KINDS)

    @property
    def spent_epsilon(self) -> float | None:
        """None: steps of several kinds do not add up; a `Budget` accounts for them together."""
        return None


class BudgetLedger(Spending[Table]):
    """The budgets of one worker's tables, which outlive its process.

    A table is known by its name: under the same name a changed file has the same budget.
    """

    kind, form = "privacy of a worker's tables", Table
    restored_by = "vfl worker TICKET --store FOLDER --restored"

    def spent(self, name: str) -> list[GaussianSteps]:
        """The steps that were taken of a table.

        Raises:
            UserError: the name cannot be that of a file.
            RunFolderError: its file is damaged.
            ConsentError: the store was put back from a copy, so nobody knows.
        """
        if self.witness.read().lost_epsilon:
            raise ConsentError(
                "what was spent of a worker's tables is not known any more",
                where=str(self.folder),
                got="a store that was put back from a copy",
                fix="leave --epsilon out; docs/backups.md says what a lost store costs",
            )
        if not _NAME.fullmatch(name):
            raise UserError(
                "a table whose budget is kept needs another name", got=name, want=_NAME.pattern
            )
        kept = self._read(name)
        taken = () if kept is None else kept.spent
        return [GaussianSteps(one.noise, one.steps, one.sampling_rate) for one in taken]

    def restored(self) -> None:
        """Say that the store was put back from a copy: from now on it grants nothing."""
        self.witness.restored(_ALL_EPSILON)

    def keep(self, name: str, spent: Sequence[GaussianSteps]) -> None:
        """Put steps on the disk."""
        kinds = [
            Steps(noise=one.noise, steps=one.steps, sampling_rate=one.sampling_rate)
            for one in spent
            if one.steps
        ]
        self._write(Table(run=name, spent=tuple(kinds)))
