"""Serve a run of one process: every party here, a function call as the link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vfl.clients.serving import ServedParty
from vfl.config import Consent
from vfl.config.run_folder import RunFolder
from vfl.core.errors import VFLError
from vfl.core.storage import locked
from vfl.server.serving import ServingParty
from vfl.serving.front import HttpFront, ServeSettings
from vfl.session import PartyFolder
from vfl.session.ledger import Meter
from vfl.session.serving import Requests, require_servable
from vfl.training.local import LocalSession
from vfl.training.run import load_data, trained


def serving_of(session: LocalSession) -> ServingParty:
    """The label party of a session in this process, its feature parties ready to answer."""
    session.begin()
    test, held = session.label.data.split.test, session.label.data.held
    rows = {one.name: test[held[one.name][test]] if held else test for one in session.clients}
    served = [
        ServedParty(client, Requests(rows[client.name], Consent(max_rows_per_second=1e9), Meter()))
        for client in session.clients
    ]

    def answer() -> None:
        for party in served:
            party.answer()

    return ServingParty(session.label, answer)


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
    first = RunFolder.open(run)
    session, folder = _session(first), first
    front = HttpFront(session.label.data.name, settings, first.path)
    version = first.path.name
    try:
        while True:
            label = session.label.data
            drift = PartyFolder(folder.party(label.name)).drift()
            front.show(version, session.terms.feature_parties, label, label.classes, drift)
            ready(front)
            front.play(serving_of(session))
            if (following := front.following()) is None:
                return
            try:
                opened = RunFolder.open(following)
                session, folder, version = _session(opened), opened, following.name
            except VFLError as error:  # what cannot be served leaves what was
                print(f"{error.what}; going on with {version}", flush=True)
    finally:
        front.close()


def _session(folder: RunFolder) -> LocalSession:
    folder.experiment().refuse_roles("serving")
    with locked(folder.path):
        session = trained(folder, load_data(folder.experiment()), "serve")
    require_servable(session.terms)
    assert isinstance(session, LocalSession), "networks that nobody holds were refused"
    return session
