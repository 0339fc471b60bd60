"""Serves a run in one process, which runs all parties; links are function calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vfl.clients.serving import ServedMiddle, ServedParty
from vfl.config import Consent
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ConfigError
from vfl.core.storage import locked
from vfl.serving.front import HttpFront, LeadSettings
from vfl.session import PartyFolder, rules
from vfl.session.label.asking import Asking, ServingParty
from vfl.session.label.front import Play, ServingFront, serve_in_turn
from vfl.session.serving import Requests, require_servable
from vfl.session.store.session_ledger import Meter
from vfl.training.run import AnySession, load_again, trained


def serving_of(session: AnySession, label: Asking) -> ServingParty:
    """Return the label party of a served session in this process, linked to the others."""
    session.begin()
    test, held = label.data.split.test, label.data.held

    def requests(party: str) -> Requests:
        rows = test[held[party][test]] if held else test
        return Requests(rows, Consent(max_rows_per_second=1e9), Meter())

    served = [ServedParty(one, requests(one.name)) for one in session.clients]

    def answer() -> None:
        for party in served:
            party.answer()

    if session.middle is None:
        return ServingParty(label, answer)
    middle = ServedMiddle(session.middle, requests(session.middle.name))

    def through_the_middle() -> None:
        middle.ask()
        answer()
        middle.give()

    behind = session.terms.feature_parties
    return ServingParty(label, through_the_middle, behind=behind)


def serve(
    run: Path,
    settings: LeadSettings,
    ready: Callable[[HttpFront], object] = lambda front: None,
) -> None:
    """Serve the test rows of a run over HTTP until the service is stopped.

    Args:
        run: folder of a run that was trained in one process.
        settings: settings of the service.
        ready: callback that is called when the service accepts requests.

    Raises:
        ConfigError: the settings name several tasks; or see `require_servable`.
        ExposedCutError: a run with this secure mode cannot be served row by row.
        RunFolderError, UserError: see `trained` and `HttpFront`.
    """
    first, task = RunFolder.open(run), settings.tasks
    if len(task) > 1:
        raise ConfigError(
            "one process serves only one task (label)",
            where="--task",
            fix="start one vfl serve for each task, each with its own --port",
        )

    def opened(folder: Path) -> Play:
        session, label = _session(RunFolder.open(folder), settings)
        asked = [name for name in rules.peers(session.terms) if name not in task]
        drift = PartyFolder(folder / "parties" / label.data.name).drift()

        def play(front: ServingFront) -> None:
            front.show(folder.name, asked, label.data, label.data.classes, drift)
            front.play(serving_of(session, label))

        return play

    owner = task[0] if task else first.experiment().label_party
    play = opened(first.path)
    front = HttpFront(owner, settings, first.party(owner) if task else first.path)
    try:
        ready(front)
        serve_in_turn(front, first.path.name, play, opened, partial(print, flush=True))
    finally:
        front.close()


def _session(folder: RunFolder, settings: LeadSettings) -> tuple[AnySession, Asking]:
    """Return a run's session and the label party that answers: the leading or a further one."""
    task = settings.tasks
    with locked(folder.path):
        data = load_again(folder)
        session = trained(folder, data, "serve", serving=task)
    require_servable(session.terms, settings.partial)
    return session, session.leads(task[0]) if task else session.label
