"""Serve a run of one process: every party here, a function call as the link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vfl.clients.serving import ServedParty
from vfl.config import Consent
from vfl.config.run_folder import RunFolder
from vfl.core.storage import locked
from vfl.server.serving import ServingParty
from vfl.serving.front import HttpFront, ServeSettings
from vfl.session.ledger import Meter
from vfl.session.serving import Requests, require_servable
from vfl.training.local import LocalSession
from vfl.training.run import load_data, trained


def serving_of(session: LocalSession) -> ServingParty:
    """The label party of a session in this process, its feature parties ready to answer."""
    session.begin()
    split = session.label.data.split
    served = [
        ServedParty(client, Requests(split.test, Consent(max_rows_per_second=1e9), Meter()))
        for client in session.clients
    ]

    def answer() -> None:
        for party in served:
            party.answer()

    def finish() -> None:
        for party in served:
            party.finish()

    return ServingParty(session.label, answer, finish)


def serve(
    run: Path,
    settings: ServeSettings,
    ready: Callable[[HttpFront], object] = lambda front: None,
) -> None:
    """Serve the test rows of a run until its front is told to stop.

    Args:
        run: folder of a run that was trained in one process.
        settings: how the service listens.
        ready: told once it does.

    Raises:
        ExposedCutError: its secure mode cannot be served.
        RunFolderError, UserError: see `trained` and `HttpFront`.
    """
    folder = RunFolder.open(run)
    with locked(folder.path):
        session = trained(folder, load_data(folder.experiment()), "serve")
        require_servable(session.terms)
        assert isinstance(session, LocalSession), "nobody's networks were refused"
        data = session.label.data
        front = HttpFront(session.terms, data, data.classes, settings, folder.path)
        try:
            ready(front)
            front.play(serving_of(session))
        finally:
            front.close()
