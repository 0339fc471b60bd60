"""Privacy budgets that noisy trainings have spent on the tables of a worker, stored on disk."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from vfl.config.toml import Settings
from vfl.core.errors import ConsentError, UserError
from vfl.privacy.accountants import GaussianSteps
from vfl.session.store.spending import Spending

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
#: Largest number of pairs (noise, sampling rate) that a budget counts separately.
MOST_KINDS = 32
#: An epsilon above any grant; a restored store counts this epsilon as spent, because it may have
#: lost records of spending.
_ALL_EPSILON = 1e9


class Steps(Settings):
    """Noise steps with the same noise and sampling rate; see `GaussianSteps`."""

    noise: float = Field(gt=0, le=1e6)
    steps: int = Field(gt=0, le=1 << 40)
    sampling_rate: float = Field(gt=0, le=1)


class Table(Settings):
    """Privacy spending on one table of a worker.

    Attributes:
        run: name by which a leader (the process that sends requests to workers) finds the table.
        spent: noise steps that trainings took on this table; if the worker was killed, also the
            steps that they may have taken.
    """

    run: str
    spent: tuple[Steps, ...] = Field(default=(), max_length=MOST_KINDS)

    @property
    def spent_epsilon(self) -> float | None:
        """Return None: epsilons of steps with different noise do not add up; see `Budget`."""
        return None


class BudgetLedger(Spending[Table]):
    """Privacy budget spent on one worker's tables; the record stays on disk when the process ends.

    A table is identified by its name: if another file is loaded under a name, the spent budget of
    the name stays.
    """

    kind, form = "privacy of a worker's tables", Table
    restored_by = "vfl worker TICKET --store FOLDER --restored"

    def spent(self, name: str) -> list[GaussianSteps]:
        """Return the noise steps that trainings have taken on a table.

        Raises:
            UserError: the table's name cannot be used as a file name.
            RunFolderError: the ledger's file is damaged.
            ConsentError: the store was restored from an old copy, so the spent budget is unknown.
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
                "a table whose budget is stored needs another name", got=name, want=_NAME.pattern
            )
        kept = self._read(name)
        taken = () if kept is None else kept.spent
        return [GaussianSteps(one.noise, one.steps, one.sampling_rate) for one in taken]

    def restored(self) -> None:
        """Record that the store was restored from an old copy; from then on it grants no budget."""
        self.witness.restored(_ALL_EPSILON)

    def keep(self, name: str, spent: Sequence[GaussianSteps]) -> None:
        """Write the spent noise steps of a table to the disk."""
        kinds = [
            Steps(noise=one.noise, steps=one.steps, sampling_rate=one.sampling_rate)
            for one in spent
            if one.steps
        ]
        self._write(Table(run=name, spent=tuple(kinds)))
