"""A party's ledger of its horizontal trainings: their settings, rounds and epsilon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vfl.config import PartyFile
from vfl.config.experiment import MAX_STEPS
from vfl.config.toml import Settings
from vfl.core.errors import ConsentError, DisagreementError
from vfl.session.store.spending import Spending


class Rounds(Settings):
    """Entry of the ledger for one horizontal training at one party.

    Attributes:
        run: name of the training.
        settings: digest of the training's settings; the name of the training is bound to this
            digest.
        rounds: number of rounds in which this party took part.
        epsilon: epsilon of the whole training, which counts as spent as soon as the training
            starts. None if the training states no epsilon.
    """

    run: str
    settings: str
    rounds: int = 0
    epsilon: float | None = None

    @property
    def spent_epsilon(self) -> float | None:
        """See `Spending.spent_epsilon`."""
        return self.epsilon


class RoundLedger(Spending[Rounds]):
    """A party's horizontal trainings.

    One epsilon limit covers horizontal trainings together with the party's sessions.
    """

    kind, form = "rounds of a horizontal training", Rounds

    def take(self, new: Rounds, most: int, allow: Callable[[float], None]) -> None:
        """Count one more round of a training, and write the count to disk.

        Args:
            new: entry with which to start if the party has not yet taken part in this training.
            most: largest number of rounds of this training in which one client takes part.
            allow: function that receives the epsilon of a new training, and raises an error if this
                epsilon is too large.

        Raises:
            DisagreementError: this training name already belongs to a training with other settings.
            ConsentError: all rounds of the training have already taken place, or `allow` raised
                this error.
        """
        with self.locked():
            known = self._read(new.run)
            if known is None:
                allow(new.epsilon or 0.0)
                known = new
            if known.settings != new.settings:
                raise DisagreementError(
                    "this run name is bound to other settings",
                    where=str(self._path(new.run)),
                    fix="another name",
                )
            if known.rounds >= most:
                raise ConsentError(
                    "all rounds of this training are used up",
                    got=f"round {known.rounds + 1} of this client",
                    want=f"at most {most} rounds of one client",
                    fix="start another training, under another name",
                )
            self._write(known.model_copy(update={"rounds": known.rounds + 1}))

    def give_up(self) -> None:
        """See `Spending.give_up`."""
        for entry in self.entries():
            self._write(entry.model_copy(update={"rounds": MAX_STEPS}))

    def _content(self, record: Mapping[str, Any]) -> Any:
        return {name: record[name] for name in Rounds.model_fields}

    def _record(self, entry: Rounds) -> dict[str, Any]:
        return entry.model_dump(mode="json", exclude={"run"})


def rounds_of(party: PartyFile) -> RoundLedger:
    """Return the ledger of a party's horizontal trainings."""
    store = party.store_path / "sessions"
    return RoundLedger(store / "horizontal", party.party, store)
