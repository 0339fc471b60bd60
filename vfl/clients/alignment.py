"""A feature party in a session that aligns rows."""

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
from vfl.session.store.witness import Announcement, Standing
from vfl.session.terms import AlignTerms
from vfl.transport import Observed


def take_part_in_alignment(
    message: SessionMessage,
    terms: AlignTerms,
    party: PartyFile,
    standing: Standing,
    say: Callable[[str], None],
) -> PartyReport:
    """Run a feature party's alignment: check consent, answer frames, store row positions.

    Args:
        message: session message that Flower delivered.
        terms: terms of the alignment that the message contains.
        party: the party's own file.
        standing: counters of the party's store and of the other parties' stores.
        say: function that writes a line to the party's log; the counts of rows appear in no other
            place.

    Raises:
        ConsentError: the session exceeds what the party's file allows; if the reason is the number
            of common ids, the error does not contain this number.
        RolledBackError: the store of a party was restored from an earlier copy.
        VFLError: any other error that ended the session; the label party has received it.
    """
    began, name = time.perf_counter(), party.party
    if name not in terms.feature_parties or party.data is None:
        raise DisagreementError(
            f"party '{name}' has no id column for this session",
            want=", ".join(terms.feature_parties),
        )
    check_alignment(terms, name, party.consent)
    standing.require(message.known, terms.label_party)
    own = OwnAlignment(party, terms)
    announced = standing.announce(terms.label_party)
    introduction = Introduction.of(None, terms, message.session, announced, party=name)
    seals = PairSeals(party, terms, message.session, standing=standing)
    limits = frame_limits(terms, name, None)
    post, kept, asked = Post(terms.everybody, own.most_bytes, own.place), None, None
    post.add(seals.offers())
    with ExitStack() as until_done, attached(message, introduction, limits) as stream:
        received = Announcement.parse(stream.terms.get("standing"), terms.label_party)
        standing.admit(terms.label_party, received)
        link = Observed(stream, name, "feature", [standing])
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
