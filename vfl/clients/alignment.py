"""A feature party's part in a session that aligns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from vfl.config import PartyFile
from vfl.core.errors import DisagreementError
from vfl.core.frame import Kind
from vfl.session import Introduction, PartyReport, SessionMessage
from vfl.session.alignment import OwnAlignment, Post
from vfl.session.consent import check_alignment, frame_limits
from vfl.session.handshake import attached
from vfl.session.relay import PairSeals
from vfl.session.terms import AlignTerms


def take_part_in_alignment(
    message: SessionMessage, terms: AlignTerms, party: PartyFile, say: Callable[[str], None]
) -> PartyReport:
    """Run one feature party: check its consent, answer every frame, store the positions.

    Args:
        message: session message from Flower.
        terms: terms in the message.
        party: the party's own file.
        say: writes a line to the party's own log, the only place with these counts.

    Raises:
        ConsentError: the session asks for more than the file allows; without a count, if it
            concerns common ids.
        VFLError: the error that ended the session, if it is none of those above; the label party
            received it.
    """
    began, name = time.perf_counter(), party.party
    if name not in terms.feature_parties or party.data is None:
        raise DisagreementError(
            f"party '{name}' has no ids for this session", want=", ".join(terms.feature_parties)
        )
    check_alignment(terms, name, party.consent)
    own = OwnAlignment(party, terms)
    introduction = Introduction.of(None, terms, message.session, party=name)
    seals, limits = PairSeals(party, terms, message.session), frame_limits(terms, name, None)
    post, kept, asked = Post(terms.everybody, own.most_bytes, own.place), None, None
    post.add(seals.offers())
    with ExitStack() as until_done, attached(message, introduction, limits) as link:
        while True:
            ready = own.advance(say)
            busy = ready is None
            for sent in ready or ():
                post.add(seals.seal(sent))
            if not busy and own.player.found is not None and kept is None:
                kept = until_done.enter_context(own.staged(message.session))
            if asked is not None:
                link.send(post.frame(done=kept is not None, busy=busy))
            asked = link.receive()
            if asked.kind is Kind.DONE and kept is not None:
                break
            if (got := post.take(asked)) is not None:
                content, opened = seals.open(*got)
                post.add(opened)
                if content is not None:
                    own.player.give(got[0], content)
    say(f"{kept.counts()}, version {kept.version}")
    seconds = time.perf_counter() - began
    return PartyReport(party=name, weights_sha256=kept.key, seconds=seconds)
