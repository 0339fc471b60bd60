"""Compare the adaptive attacker with the heavy pack of attacks on a grid, with equal CPU time.

    vfl grid quick --defense potential:alpha=4 --defense potential:alpha=16 --defense dcor:alpha=4 \
        --defense label_dp:flip=0.08 --defense anchored:rate=0.02+potential:alpha=2,norm=no \
        --attack kmeans --leaks 5 --draws 1 --seeds 0,1 -s grid.baselines=raw --out runs/defended
    python -m benchmarks.adaptive runs/defended

With `--over gradients`, the victims are trainings of a grid that stored its recordings (`-s
grid.record=training`). The pack then consists of attacks on gradients, and the measure is AUC.

On each victim, the attacks of the pack run one after another. The best attack of the pack is then
chosen by the true labels, which no attacker has. The adaptive attacker may use as much processor
time as all of these attacks together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import harness
from vfl import attacks
from vfl.attacks.labels import propagation
from vfl.attacks.labels.adaptive import Adaptive
from vfl.config.grid import HEAVY
from vfl.config.run_folder import RunFolder
from vfl.core.seeds import generator, use_one_thread
from vfl.datasets import PartyData
from vfl.experiments.attack_runner import run_attack
from vfl.experiments.cells import GridFolder, grid_settings_of
from vfl.experiments.leaderboard import UNDEFENDED
from vfl.experiments.scenarios import Cases, scenario_of
from vfl.experiments.scores import BASELINES
from vfl.training.run import load_data

Over = Literal["cuts", "gradients"]
#: For each access (cuts or gradients): the attacks of the pack, the layers that the adaptive
#: attacker reads, and the measure.
PACKS: dict[Over, tuple[Sequence[str], str, str]] = {
    "cuts": (HEAVY, "cut+before+inputs", "accuracy"),
    "gradients": (
        (
            "gradient_similarity:epochs=8", "gradient_direction:epochs=8",
            "gradient_teacher:epochs=8,steps=300", "gradient_mixture", "batch_sums",
        ),
        "accumulated+inputs", "auc",
    ),
}  # fmt: skip


#: Least processor time of the adaptive attacker in seconds, because five attacks on gradients take
#: less time than a search over compositions.
LEAST_S: dict[Over, float] = {"cuts": 0.0, "gradients": 20.0}


@dataclass(frozen=True)
class Compared:
    """Result of the comparison on one victim.

    Attributes:
        victim: defense and seed of the victim.
        k: number of leaked labels of each class.
        best: spec of the best attack of the pack.
        heavy, adaptive, gain: score of the best attack of the pack, score of the adaptive attacker,
            and their difference, in percent; the score is the fraction of right answers, or AUC.
        budget_s, spent_s: processor time that the adaptive attacker may use, and time that it
            used. It may use the time of the whole pack, and at least `LEAST_S`.
        tried: number of compositions that the adaptive attacker tried.
        voted: specs of the compositions whose votes gave the result.
    """

    victim: str
    k: int
    best: str
    heavy: float
    adaptive: float
    gain: float
    budget_s: float
    spent_s: float
    tried: int
    voted: str


def compare(cases: Cases, seed: int, k: int, victim: str, over: Over = "cuts") -> Compared:
    """Run the pack, then the adaptive attacker, on one victim with one draw of leaked labels."""
    specs, layers, measure = PACKS[over]

    def attempt(spec: str) -> tuple[float, float, attacks.Attack]:
        made = attacks.make(spec)
        leak = generator(seed, "leak", 0)
        case = cases.case(scenario_of(made, spec, own_columns=True), k, leak)
        started = time.process_time()
        found = run_attack(case, made, generator(seed, "attack", 0))
        score = next(s for s in found.scores if s.measure.endswith(measure))
        return 100 * score.value, time.process_time() - started, made

    propagation.forget_neighbours()
    pack = {spec: attempt(spec)[:2] for spec in specs}
    best = max(pack, key=lambda spec: pack[spec][0])
    budget = max(LEAST_S[over], sum(seconds for _, seconds in pack.values()))
    propagation.forget_neighbours()
    value, spent, made = attempt(f"adaptive:at={layers},budget_s={budget}")
    assert isinstance(made, Adaptive)
    assert made.report is not None
    return Compared(
        victim, k, best, pack[best][0], value, value - pack[best][0], round(budget, 2),
        round(spent, 2), len(made.report.trials), "; ".join(made.report.best),
    )  # fmt: skip


def compare_all(run: Path, leaks: Sequence[int] = (5,), over: Over = "cuts") -> list[Compared]:
    """Compare the adaptive attacker with the heavy pack on every stored victim with a defense.

    Args:
        run: folder of a grid.
        leaks: numbers of leaked labels of each class.
        over: whether the attackers use cuts or gradients.
    """
    use_one_thread()
    folder, found = GridFolder(run), list[Compared]()
    settings, known = grid_settings_of(folder.experiment()), dict[int, Mapping[str, PartyData]]()
    for cell in folder.cells():
        if cell.victim in (BASELINES, UNDEFENDED):
            continue
        seed, victim = cell.experiment.seed, RunFolder(folder.cells_path / cell.name)
        if seed not in known:
            known[seed] = load_data(cell.experiment)
        cases = Cases(victim.experiment(), known[seed], settings, victim)
        for k in leaks:
            found.append(compare(cases, seed, k, f"{cell.victim}, seed {seed}", over))
            harness.say(f"{found[-1].victim}, k = {k}: {found[-1].gain:+.1f}")
    return found


CELLS = harness.table(
    ("victim", "", "victim"),
    ("k", "", "k"),
    ("best of heavy", "", "best"),
    ("reaches", ".1f", "heavy"),
    ("adaptive", ".1f", "adaptive"),
    ("ahead by", "+.1f", "gain"),
    ("its time, s", ".2f", "spent_s"),
    ("of", ".2f", "budget_s"),
    ("voted", "", "voted"),
    markdown=True,
)


def table(rows: Sequence[Compared]) -> str:
    """Format one line per victim, and count how often the adaptive attacker scored higher."""
    ahead = sum(one.gain > 0 for one in rows)
    above = sum(one.spent_s > one.budget_s for one in rows)
    return f"{CELLS(rows)}\n\nahead on {ahead} of {len(rows)}, above its budget on {above}"


main = harness.command(compare_all, table)


if __name__ == "__main__":
    main()
