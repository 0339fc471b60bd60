"""Where attacks meet a victim: the cases that trials ask for, and what each trial was worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from vfl import attacks
from vfl.attacks import Attack, Evidence, Grant, ThreatModel, View
from vfl.attacks.active import make_adversary
from vfl.attacks.baselines import Kind, label_free_bottom, view_behind
from vfl.attacks.case import Case, seeking
from vfl.attacks.victim import Setting, Victim
from vfl.attacks.wrapper import Wrapper
from vfl.errors import NonFiniteError, SpecError
from vfl.grid.cells import HONEST
from vfl.grid.gallery import Gallery
from vfl.grid.identity import code_of
from vfl.grid.outcomes import Outcomes
from vfl.grid.scenes import Scene, scene_of
from vfl.grid.scores_file import Scored, ScoresFile, key_of
from vfl.grid.trials import OUTCOME, TRAINED, Trial
from vfl.grid.tried import Tried, tried
from vfl.seeds import generator

#: What shows an attack its victim, and scores it; and what does besides, of other goals.
_BEHIND = ("vfl.attacks.case", "vfl.attacks.recorded_case", "vfl.attacks.victim")
_BESIDES = (
    "vfl.attacks.active.begin", "vfl.attacks.attribute_case", "vfl.attacks.queried_case",
    "vfl.attacks.summed_case", "vfl.grid.outcomes", "vfl.grid.recordings", "vfl.grid.tried",
)  # fmt: skip
#: What makes bottoms that saw no label.
_FREE = ("vfl.attacks.baselines", "vfl.defenses.label_free")
_OF_LABELS = ("asked", "heard")
#: What only pictures are measured by.
_PICTURES = {"ssim"}


class Ground:
    """A victim with the cases that trials ask for, the last of each kind kept.

    Args:
        victim: who is attacked.
        seed: leaked rows and the attacks' own draws follow from it, alike for every victim of it.
        setting: which rows play which part.
        width: of label-free cuts.
        about: what every value depends on besides the trial, for its key.
        cases: makes the case of any other scene than "asked", of a leak and its draw.
        outcomes: what adversaries reached with it.
        adversary: spec of the one it was trained against.
        gallery: where pictures that attacks make are kept; None keeps none.
    """

    def __init__(
        self,
        victim: Victim,
        seed: int,
        setting: Setting,
        width: int,
        about: Mapping[str, Any],
        cases: Callable[[Scene, int, torch.Generator], Case] | None = None,
        outcomes: Outcomes | None = None,
        adversary: str = HONEST,
        gallery: Gallery | None = None,
    ) -> None:
        self._victim, self._seed, self._setting, self._width = victim, seed, setting, width
        self._cases_of, self._outcomes, self._gallery = cases, outcomes, gallery
        self._adversary = adversary
        self._about = dict(about) | {"setting": repr(setting), "seed": seed}
        self._leak: tuple[int, int] | None = None
        self._cases: dict[tuple[Scene, str], Case] = {}
        self._bottoms: dict[tuple[str, int], tuple[nn.Module, dict[int, Evidence]]] = {}

    def go_through(self, trials: Iterable[Trial], scores: ScoresFile) -> Iterator[Scored]:
        """The score of each trial, from the file if it is there, else tried and added to it."""
        scores.mend()
        for trial in trials:
            found = self._known(trial, scores)
            if found is None:
                found = self._scored(trial)
                scores.add(found)
            yield found

    def lacking(self, trials: Iterable[Trial], scores: ScoresFile) -> list[Trial]:
        """The trials that have no score in the file."""
        return [trial for trial in trials if self._known(trial, scores) is None]

    def known(self, trials: Iterable[Trial], scores: ScoresFile) -> list[Scored]:
        """The scores of those trials that have one in the file, by attacks that still are there."""
        found = []
        for trial in trials:
            with suppress(SpecError):
                found.append(self._known(trial, scores))
        return [one for one in found if one is not None]

    def _known(self, trial: Trial, scores: ScoresFile) -> Scored | None:
        """Its score, unless pictures of it are wanted and were not kept."""
        found = scores.get(self._key(trial))
        wanted = self._gallery is not None and found is not None and _PICTURES & _measures(found)
        if wanted and self._gallery is not None and self._gallery.get(self._key(trial)) is None:
            return None
        return found

    def _scored(self, trial: Trial) -> Scored:
        key, (found, seconds) = self._key(trial), self._tried(trial)
        if self._gallery is not None and found.true is not None and found.found is not None:
            self._gallery.keep(key, found.true, found.found)
        first, *others = found.scores
        return Scored(
            key=key,
            attack=trial.attack,
            bottom=trial.bottom,
            k=trial.k,
            draw=trial.draw,
            measure=first.measure,
            value=first.value,
            guess=first.guess,
            threat=self._sentence(found.threat),
            seconds=round(seconds, 4),
            also=[(one.measure, one.value, one.guess) for one in others],
        )

    def _tried(self, trial: Trial) -> tuple[Tried, float]:
        """What came of a trial, and the seconds that took."""
        draw = generator(self._seed, "attack", trial.draw)
        if trial.bottom == OUTCOME:
            assert self._outcomes is not None
            started = time.perf_counter()
            return self._outcomes.of(trial.attack, draw), time.perf_counter() - started
        attack = attacks.make(trial.attack)
        case = self._case(trial, scene_of(attack, trial.attack, own_columns=True))
        started = time.perf_counter()
        try:
            return tried(case, attack, draw), time.perf_counter() - started
        except NonFiniteError as error:
            error.where = trial.attack
            raise

    def _sentence(self, threat: ThreatModel) -> str:
        if self._adversary == HONEST:
            return threat.sentence()
        told = replace(threat, behaviour="malicious").sentence()
        return f"{told} While the victim trained it was {self._adversary}."

    def _case(self, trial: Trial, scene: Scene) -> Case:
        leak = trial.k, trial.draw
        if leak != self._leak:
            self._leak, self._cases = leak, {}
        plain = scene, TRAINED
        if plain not in self._cases:
            drawn = generator(self._seed, "leak", trial.draw)
            self._cases[plain] = self._plain(scene, trial.k, drawn)
        if (scene, trial.bottom) not in self._cases:
            self._cases[scene, trial.bottom] = self._free(trial.bottom, self._cases[plain])
        return self._cases[scene, trial.bottom]

    def _plain(self, scene: Scene, k: int, drawn: torch.Generator) -> Case:
        if scene != "asked":
            assert self._cases_of is not None
            return self._cases_of(scene, k, drawn)
        return seeking(self._victim.case(k, drawn, self._setting))

    def _free(self, kind: str, case: Case) -> Case:
        """The same behind a label-free bottom; where others collude, behind one of each."""
        view, partners = case.view, []
        if Grant.PARTNERS in view.threat.grants:
            partners = [
                view_behind(one, *self._bottom(kind, place, one, one.targets.cuts.shape[1]))
                for place, one in enumerate(view.partners, 1)
            ]
        own = view_behind(view, *self._bottom(kind, 0, view, self._width))
        return replace(case, view=own.instead(partners=partners) if partners else own)

    def _bottom(
        self, kind: str, place: int, view: View, width: int
    ) -> tuple[nn.Module, dict[int, Evidence]]:
        """A label-free bottom and what it made; no leak changes the unlabelled rows it follows."""
        if (kind, place) not in self._bottoms:
            features = generator(self._seed, "label-free")
            made = label_free_bottom(cast(Kind, kind), view, width, features)
            self._bottoms[kind, place] = made, {}
        return self._bottoms[kind, place]

    def _key(self, trial: Trial) -> str:
        made = (make_adversary if trial.bottom == OUTCOME else attacks.make)(trial.attack)
        about = {"attack": trial.attack, "k": trial.k, "draw": trial.draw, "bottom": trial.bottom}
        about["code"] = code_of(*_modules(made), *_BEHIND, *self._beside(trial, made))
        return key_of(self._about | about)

    def _beside(self, trial: Trial, made: object) -> tuple[str, ...]:
        """What else stands behind a score than an attack on the victim's labels does."""
        if trial.bottom not in (TRAINED, OUTCOME):
            return _FREE
        labels = isinstance(made, Attack) and scene_of(made, trial.attack, True) in _OF_LABELS
        return () if labels and trial.bottom == TRAINED else _BESIDES


def _modules(made: object) -> Iterator[str]:
    """Where the code of an attack stands, and of the one it hands its evidence to."""
    yield type(made).__module__
    if isinstance(made, Wrapper):
        yield from _modules(made.inner)


def _measures(found: Scored) -> set[str]:
    return {found.measure, *(name for name, _, _ in found.also)}
