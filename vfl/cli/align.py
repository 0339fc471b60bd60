"""``vfl align``: finds the rows that all parties have, by private set intersection."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vfl.cli.federation import project_of
from vfl.cli.output import Json, Set, argument, emit, option, print_line, progress_line, say
from vfl.core.traffic import size

if TYPE_CHECKING:
    from vfl.config import Experiment
    from vfl.federation.project import LabelFolder


def align(
    path: Annotated[
        Path,
        argument(
            "An experiment whose parties have separate files, or a project.",
            "EXPERIMENT.toml|PROJECT",
        ),
    ],
    settings: Set = None,
    preview: Annotated[
        bool, option("Count the common ids that each id rule adds; store nothing.", "--preview")
    ] = False,
    rules: Annotated[
        str | None, option("Id rules to preview, joined by +; by default all of vfl's own.")
    ] = None,
    hidden: Annotated[
        int | None,
        option(
            "Measure the value of joining without disclosing which rows are common: each table "
            "then appears to have this number of ids.",
            "IDS",
            min=1,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Find the rows that all parties have, without disclosing ids.

    For an experiment, one process runs every party with its own file, and writes row positions to
    the folder in `data.alignment`, or else next to the experiment file. A project aligns on its
    SuperLink with the connected SuperNodes, and every party stores its own row positions under the
    alignment's name. With --hidden no party learns which rows are common: both parties learn how
    many are common, and the label party also learns sums of products of two inputs over these rows,
    from which it computes regressions. Settings of the alignment are `data.id_rules` and the table
    `[align]`, such as align.protocol=ecdh. With data.missing_rows=token the alignment also contains
    rows that some party lacks, and the label party learns which party lacks which rows.
    """
    if path.is_dir():
        _on_the_federation(path, settings or [], preview or hidden is not None, json)
        return
    from vfl.config import read_experiment
    from vfl.config.validate import UNNAMED_ALIGNMENT
    from vfl.training import alignment

    experiment = read_experiment(path, settings or [])
    if preview:
        _preview(experiment, rules, json)
        return
    if hidden is not None:
        _hidden(experiment, hidden, json)
        return
    folder = Path(experiment.data.alignment or path.resolve().parent / UNNAMED_ALIGNMENT)
    done = alignment.align(experiment, experiment.align.protocol, folder, progress_line.show)
    progress_line.end()
    sent = {party: done.traffic.of(party) if done.traffic else 0 for party in done.ids}
    if json:
        facts = {"common": done.common, "ids": done.ids, "versions": done.versions}
        emit(facts | {"reused": done.reused, "bytes": sent, "folder": str(folder)})
        return
    print_line("common rows", done.common)
    for party, count in done.ids.items():
        told = "used again" if done.reused else f"{size(sent[party])} sent and received"
        print_line(party, f"{count} ids, version {done.versions[party]}, {told}")
    print_line("positions", folder)
    if experiment.data.alignment is None:
        print_line("then", f"vfl train {path} -s data.alignment={folder}")


def _preview(experiment: Experiment, rules: str | None, json: bool) -> None:
    from vfl.datasets.alignment.ids import PREVIEW
    from vfl.training import alignment

    gains = alignment.preview(experiment, experiment.align.protocol, rules or PREVIEW)
    if json:
        emit([vars(gain) for gain in gains])
        return
    print(f"{'rules':<40}{'common':>10}{'gained':>10}  ids changed, repeated")
    for gain in gains:
        own = ", ".join(
            f"{party} {changed}, {gain.repeated[party]}" for party, changed in gain.changed.items()
        )
        print(f"{gain.rules:<40}{gain.common:>10}{gain.gained:>+10}  {own}")


def _hidden(experiment: Experiment, pad: int, json: bool) -> None:
    from vfl.training.hidden import hidden_statistics

    found = hidden_statistics(experiment, pad)
    if json:
        emit(asdict(found))
        return
    print_line("common rows", found.common)
    print("explained share of the label's variance, by linear regressions on each party's inputs")
    for party, share in found.explained.items():
        used = f"{found.inputs[party]} inputs" if party in found.inputs else ""
        if left_out := found.left_out.get(party):
            used += f", {left_out} inputs with too few rows are left out"
        print_line(party, f"{share:>7.3f}   {used}".rstrip())
    print_line("sent", f"{size(sum(found.payload_bytes.values()))}, in all")


def align_on_the_federation(
    label: LabelFolder, settings: list[str], simulated: bool = False
) -> dict[str, Any]:
    """Align the parties of a project; return the counts in the alignment's record."""
    from vfl.config.run_folder import new_run_name
    from vfl.core.storage import read_json
    from vfl.training import federated

    name = new_run_name("align")
    say(f"submitting alignment {name}")
    tell = progress_line.show
    run = federated.run_session(
        label,
        "align",
        name,
        overrides=settings,
        on_note=say,
        on_progress=tell,
        simulated=simulated,
    )
    progress_line.end()
    facts: dict[str, Any] = read_json(run / federated.OUTCOMES["align"])
    return facts


def _on_the_federation(project: Path, settings: list[str], preview: bool, json: bool) -> None:
    if preview:
        raise typer.BadParameter(
            "this option works only for an experiment in one process",
            param_hint="--preview, --hidden",
        )
    label, experiment = project_of(project, settings)
    facts = align_on_the_federation(label, settings)
    if json:
        emit(facts)
        return
    print_line("common rows", f"{facts['common']} of {facts['ids']}, version {facts['version']}")
    if "rows" in facts:
        lacking = ", ".join(f"{party} lacks {count}" for party, count in facts["lacking"].items())
        print_line("session rows", f"{facts['rows']}; {lacking}")
    for party, count in facts["bytes"].items():
        print_line(party, f"{size(count)} sent and received")
    if experiment.align.table == "predict":
        print_line("then", "vfl predict RUN")
        return
    named = "" if experiment.data.alignment else f" -s data.alignment={facts['name']}"
    print_line("then", f"vfl train {project}{named}")
