"""``vfl advise``: what each party sees in an experiment, and the evidence for its defenses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import Json, Set, argument, emit, option

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.experiments.advise import Finding


def advise(
    path: Annotated[
        Path, argument("An experiment file, or a label party's project.", "EXPERIMENT.toml|PROJECT")
    ],
    settings: Set = None,
    fear: Annotated[
        list[str] | None,
        option(
            "Check only exposures of this asset: labels, columns, records, answers, inputs or "
            "lengths. Repeat the option for several assets.",
            "--fear",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List what each party sees, the defenses in use, and the evidence for these defenses.

    The command trains nothing and reads no data. The exit code is 0 if every exposure has a defense
    that is proven, withstood the measured attacks, or hides a part; 1 if an exposure has no
    defense, or only a defense that a known attack defeated; 2 if the experiment cannot be read.
    """
    from vfl.core.registry import require_choice
    from vfl.experiments.advise import ASSETS, findings_of

    for name in fear or ():
        require_choice("--fear", name, ASSETS)
    experiment = _experiment_at(path, settings or [])
    found = findings_of(experiment, [one for one in ASSETS if one in (fear or ASSETS)])
    unprotected = sum(one.status in ("open", "weak") for one in found)
    if json:
        emit(
            {
                "experiment": experiment.name,
                "defense": experiment.defense,
                "secure": experiment.secure,
                "findings": [one.as_dict() for one in found],
                "unprotected": unprotected,
            }
        )
    else:
        for one in found:
            _print(one)
        print(f"{unprotected} of {len(found)} exposures have no defense to rely on")
        print("evidence holds for the attacks, data and seeds of its page (docs/defenses.md)")
    if unprotected:
        raise typer.Exit(1)


def _experiment_at(path: Path, settings: list[str]) -> Experiment:
    from vfl.federation.project import LabelFolder
    from vfl.training import specs

    if path.is_dir():
        return LabelFolder.find(path).experiment(settings, specs.spec_mistakes)
    return specs.read_checked(path, settings)[0]


def _print(finding: Finding) -> None:
    of = finding.exposure
    print(f"{finding.status.upper():<9} {of.asset} of {of.owner}, from {of.attacker} ({of.role})")
    lines = [("sees", of.sees)]
    for one in finding.has:
        lines += [("has", one.set), ("proven", one.proven), ("measured", one.measured)]
    lines += [("states", text) for text in finding.statements]
    lines += [("measured", text) for text in finding.measured]
    lines += [("weak", text) for text in finding.weak]
    if finding.status in ("open", "weak"):
        lines += [("try", f"{one.set}: costs {one.costs}") for one in finding.take]
    for name, text in lines:
        print(f"{'':<10}{name:<9} {text}")
