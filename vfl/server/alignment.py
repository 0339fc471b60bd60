"""The label party in a session that aligns rows: its own part, and the message relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.serverapp import Grid

from vfl.config import Experiment, PartyFile
from vfl.config.run_folder import RunFolder
from vfl.core.errors import ProtocolError
from vfl.core.frame import Frame, Kind
from vfl.core.storage import write_json
from vfl.core.traffic import Ledger
from vfl.datasets import PartyData, Split
from vfl.server.federation import Federation
from vfl.session.alignment import OwnAlignment, Post
from vfl.session.consent import check_alignment
from vfl.session.progress import AlignmentProgress, ProgressReport, WaitingFor
from vfl.session.store.witness import Standing
from vfl.session.terms import AlignTerms
from vfl.transport import ObservedPoll

OUTCOME = "alignment.json"
_COLLECT_S = 10.0


def run_alignment(
    grid: Grid,
    experiment: Experiment,
    party: PartyFile,
    terms: AlignTerms,
    folder: RunFolder,
    standing: Standing,
    say: Callable[[str], None],
    simulation: bool = False,
) -> None:
    """Align rows with every feature party, and store the label party's row positions.

    Raises:
        ConsentError: a feature party refused; only that party's log contains the reason.
        VFLError: any other error that ended the session.
    """
    check_alignment(terms, party.party, party.consent)
    own, ledger = OwnAlignment(party, terms), Ledger()
    rowless = PartyData(party.party, None, None, None, Split(), b"")
    settings = experiment.federation

    def tell(report: ProgressReport) -> None:
        folder.progress(report.record())

    progress = AlignmentProgress(tell)
    with Federation(
        grid,
        terms,
        settings,
        rowless,
        settings.join_timeout_s,
        say,
        simulation=simulation,
        waiting=WaitingFor(terms.mode, tell),
        standing=standing,
    ) as federation:
        links = federation.join([ledger, standing, progress.frame])
        _carry(own, links, say)
        with own.staged(federation.session) as kept:
            for link in links.values():
                link.send(Frame(Kind.DONE))
        federation.collect(_COLLECT_S)
    say(f"{kept.counts()}, version {kept.version}")
    sent = dict.fromkeys(links, 0)
    for row in ledger.rows():
        sent[row.party] += row.wire_bytes
    facts: dict[str, Any] = {"common": kept.common, "ids": kept.ids, "version": kept.version}
    if kept.complete is not None:
        facts["rows"] = len(kept.positions)
        facts["lacking"] = {name: int((~has).sum()) for name, has in kept.held.items()}
    write_json(folder.path / OUTCOME, facts | {"name": terms.alignment, "bytes": sent})


def _carry(own: OwnAlignment, links: dict[str, ObservedPoll], say: Callable[[str], None]) -> None:
    """Query the feature parties in turn, until all parties have the aligned row positions."""
    terms, me = own.terms, own.party.party
    posts = {name: Post(terms.everybody, own.most_bytes, own.place) for name in links}
    while True:
        ready = own.advance(say)
        moved, ended = ready is None, sum(post.done for post in posts.values())
        for sent in ready or ():
            posts[sent.to].put(me, sent.payload)
        for name, link in links.items():
            asked = posts[name].frame()
            link.send(asked)
            answer = link.receive()
            got = posts[name].take(answer)
            moved = moved or posts[name].busy
            moved = moved or max(len(asked.payload), len(answer.payload)) > 2
            if got is None:
                continue
            to, payload = got
            if to == me:
                own.player.give(name, payload)
            elif to in posts and to != name:
                posts[to].put(name, payload)
            else:
                raise ProtocolError(f"party '{name}' sends a message to itself")
        done = sum(post.done for post in posts.values())
        if done == len(posts) and ready is not None and own.player.found is not None:
            return
        if not moved and done == ended:
            raise ProtocolError("the parties of an alignment wait for each other")
