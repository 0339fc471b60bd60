"""Trials: which attack meets a victim, or a bottom that never saw a label, with which leak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vfl.config import GridSettings
from vfl.registry import parse

#: The victim's own bottom, as opposed to a label-free one.
TRAINED = "trained"
#: The bottom that an attack from scratch meets: it looks at none.
ANY = "raw"
#: Baselines by the attack that they are; the others are bottoms.
SCRATCH = {"scratch": "scratch", "scratch_unlabelled": "scratch:unlabelled=true"}

#: The attack of feature parties that lay their rows side by side.
_POOLED = "pooled"

#: In the place of a bottom: no attack, but what an adversary itself reached.
OUTCOME = "outcome"

#: What stands in the place of the defense in a cell of baselines.
BASELINES = "baselines"


@dataclass(frozen=True, slots=True)
class Trial:
    """One attack, once.

    Attributes:
        attack: its spec, or an adversary's.
        k: leaked labels of each class, 0 where it uses none.
        draw: which draw of them.
        bottom: `TRAINED`, or a label-free one, see `vfl.attacks.baselines`; or `OUTCOME`.
    """

    attack: str
    k: int
    draw: int
    bottom: str = TRAINED


@dataclass(frozen=True, slots=True)
class Attempts:
    """Which attacks are tried, and how often.

    Attributes:
        leaking: specs of those that use leaked labels.
        once: specs of those that use none, so that trying them once is enough.
        leaks: leaked labels of each class.
        draws: of leaked rows.
        alone: specs of those that have no baseline, for they read what a training left.
        outcomes: specs of adversaries whose own success is measured.
        unseen: specs that label-free bottoms do not meet; training from scratch stands beside them.
    """

    leaking: Sequence[str]
    once: Sequence[str]
    leaks: Sequence[int]
    draws: int
    alone: frozenset[str] = frozenset()
    outcomes: Sequence[str] = ()
    unseen: frozenset[str] = frozenset()

    def on_victim(self) -> list[Trial]:
        """Every attack on the victim itself, and what adversaries reached."""
        return self.on() + [Trial(spec, 0, 0, OUTCOME) for spec in self.outcomes]

    def on(self, bottoms: Sequence[str] = (TRAINED,)) -> list[Trial]:
        """Every attack on these bottoms, the trials of one leak together."""
        found = [Trial(spec, 0, 0, bottom) for bottom in bottoms for spec in self.once]
        return found + [
            Trial(spec, k, draw, bottom)
            for draw in range(self.draws)
            for k in self.leaks
            for bottom in bottoms
            for spec in self.leaking
        ]

    def baselines(self, names: Sequence[str]) -> list[Trial]:
        """What the trials on the victim are set against; see `GridSettings.baselines`."""
        bottoms = [name for name in names if name not in SCRATCH]
        leaking = [spec for spec in self.leaking if spec not in self.alone]
        once = [spec for spec in self.once if spec not in self.alone]
        scratch = dict.fromkeys(
            scratch_of(spec, name) for spec in leaking for name in names if name in SCRATCH
        )
        found = replace(self, leaking=list(scratch), once=()).on((ANY,))
        # Without labels the baseline of the thesis is the same attack on the inputs themselves.
        found += replace(self, leaking=(), once=once).on((ANY,))
        further = replace(
            self,
            leaking=[spec for spec in leaking if spec not in self.unseen],
            once=[spec for spec in once if spec not in self.unseen],
        ).on(bottoms)
        return list(dict.fromkeys(found + further))


def baselines_of(trial: Trial, names: Sequence[str]) -> dict[str, Trial]:
    """The baselines of one trial by name; those from scratch need leaked labels."""
    found = {name: replace(trial, bottom=name) for name in names if name not in SCRATCH}
    if trial.k == 0:
        return {"scratch": replace(trial, bottom=ANY)} | found
    scratch = [name for name in names if name in SCRATCH]
    return {
        name: Trial(scratch_of(trial.attack, name), trial.k, trial.draw, ANY) for name in scratch
    } | found


def scratch_of(spec: str, name: str) -> str:
    """Training from scratch on what an attack's leaked rows are; of all who pool, if they do."""
    pooled = parse(spec)[0] == _POOLED
    return f"{_POOLED}:of={SCRATCH[name]}" if pooled else SCRATCH[name]


def setting_words(settings: GridSettings) -> str:
    """Which rows play which part, to know scores of another setting."""
    parts = [settings.leaks_from, settings.unlabelled, settings.trained_by, settings.party]
    parts += [f"columns {settings.known_columns}"]
    if settings.attribute is not None:
        parts += [f"attribute {settings.attribute}"]
    return ", ".join(map(str, parts))
