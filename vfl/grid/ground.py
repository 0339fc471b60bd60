"""Where attacks meet a victim: the cases that trials ask for, and what each trial was worth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn

from vfl import attacks
from vfl.attacks.baselines import Kind, behind, label_free_bottom
from vfl.attacks.case import Case, attempt
from vfl.attacks.victim import Setting, Victim
from vfl.grid.identity import code_of
from vfl.grid.scenes import Recordings, Scene, scene_of
from vfl.grid.scores_file import Scored, ScoresFile, key_of
from vfl.grid.trials import TRAINED, Trial
from vfl.seeds import generator

#: What shows an attack its victim, and scores it.
_BEHIND = ("vfl.attacks.case", "vfl.attacks.recorded_case", "vfl.attacks.victim")


class Ground:
    """A victim with the cases that trials ask for, the last of each kind kept.

    Args:
        victim: who is attacked.
        seed: leaked rows and the attacks' own draws follow from it, alike for every victim of it.
        setting: which rows play which part.
        width: of label-free cuts.
        about: what every value depends on besides the trial, for its key.
        recordings: of its training, for attacks on what was heard or received.
    """

    def __init__(
        self,
        victim: Victim,
        seed: int,
        setting: Setting,
        width: int,
        about: Mapping[str, Any],
        recordings: Recordings | None = None,
    ) -> None:
        self._victim, self._seed, self._setting, self._width = victim, seed, setting, width
        self._recordings = recordings
        self._about = dict(about) | {"setting": repr(setting), "seed": seed}
        self._leak: tuple[int, int] | None = None
        self._cases: dict[str, Case] = {}
        self._bottoms: dict[str, nn.Module] = {}

    def go_through(self, trials: Iterable[Trial], scores: ScoresFile) -> Iterator[Scored]:
        """The score of each trial, from the file if it is there, else tried and added to it."""
        scores.mend()
        for trial in trials:
            found = scores.get(self._key(trial))
            if found is None:
                found = self._tried(trial)
                scores.add(found)
            yield found

    def lacking(self, trials: Iterable[Trial], scores: ScoresFile) -> list[Trial]:
        """The trials that have no score in the file."""
        return [trial for trial in trials if scores.get(self._key(trial)) is None]

    def _tried(self, trial: Trial) -> Scored:
        attack = attacks.make(trial.attack)
        case = self._case(trial, scene_of(attack, trial.attack, own_columns=True))
        draw = generator(self._seed, "attack", trial.draw)
        started = time.perf_counter()
        score = attempt(case, attack, draw)
        return Scored(
            key=self._key(trial),
            attack=trial.attack,
            bottom=trial.bottom,
            k=trial.k,
            draw=trial.draw,
            measure=score.measure,
            value=score.value,
            guess=score.guess,
            threat=case.view.only(attack.needs).threat.sentence(),
            seconds=round(time.perf_counter() - started, 4),
        )

    def _case(self, trial: Trial, scene: Scene) -> Case:
        leak = trial.k, trial.draw
        if leak != self._leak:
            self._leak, self._cases = leak, {}
        drawn = generator(self._seed, "leak", trial.draw)
        if scene != "asked" and scene not in self._cases:
            assert self._recordings is not None
            self._cases[scene] = self._recordings.case(scene, trial.k, drawn)
        elif scene == "asked" and TRAINED not in self._cases:
            case = self._victim.case(trial.k, drawn, self._setting)
            assert case.labels is not None
            self._cases[TRAINED] = replace(case, positive=case.labels == 1)
        if scene == "asked" and trial.bottom not in self._cases:
            plain = self._cases[TRAINED]
            self._cases[trial.bottom] = behind(plain, self._bottom(trial.bottom, plain))
        return self._cases[trial.bottom if scene == "asked" else scene]

    def _bottom(self, kind: str, case: Case) -> nn.Module:
        """A label-free bottom; it follows from unlabelled rows, which no leak changes."""
        if kind not in self._bottoms:
            features = generator(self._seed, "label-free")
            inputs = case.view.unlabelled.inputs
            made = label_free_bottom(cast(Kind, kind), inputs, self._width, features)
            self._bottoms[kind] = made
        return self._bottoms[kind]

    def _key(self, trial: Trial) -> str:
        beside = _BEHIND if trial.bottom == TRAINED else (*_BEHIND, "vfl.attacks.baselines")
        code = code_of(type(attacks.make(trial.attack)).__module__, *beside)
        tried = {"attack": trial.attack, "k": trial.k, "draw": trial.draw, "bottom": trial.bottom}
        return key_of(self._about | tried | {"code": code})
