"""Serve a run of one process: every party here, a function call as the link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vfl.clients.serving import ServedMiddle, ServedParty
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
from vfl.training.several_tasks import SeveralTasksSession
from vfl.training.u_shape import UShapedSession

Session = LocalSession | SeveralTasksSession | UShapedSession


def serving_of(session: Session) -> ServingParty:
    """The label party of a session in this process, its other parties ready to answer."""
    if isinstance(session, LocalSession):
        session.begin()
    features = session.features if isinstance(session, UShapedSession) else session.clients
    test, held = session.label.data.split.test, session.label.data.held

    def requests(party: str) -> Requests:
        rows = test[held[party][test]] if held else test
        return Requests(rows, Consent(max_rows_per_second=1e9), Meter())

    served = [ServedParty(one, requests(one.name)) for one in features]

    def answer() -> None:
        for party in served:
            party.answer()

    if not isinstance(session, UShapedSession):
        return ServingParty(session.label, answer)
    middle = ServedMiddle(session.middle, requests(session.middle.name))

    def through_the_middle() -> None:
        middle.ask()
        answer()
        middle.give()

    behind = session.terms.feature_parties
    return ServingParty(session.label, through_the_middle, behind=behind)


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
            front.show(version, session.terms.peers, label, label.classes, drift)
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


def _session(folder: RunFolder) -> Session:
    with locked(folder.path):
        session = trained(folder, load_data(folder.experiment()), "serve")
    require_servable(session.terms)
    assert isinstance(session, Session), "networks that nobody holds were refused"
    return session
