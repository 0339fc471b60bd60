"""Before the first share: the parties compare what they were started with, and their rows."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from vfl.core.errors import DisagreementError, MisalignedError, ProtocolError
from vfl.datasets import PartyData
from vfl.mpc import Party
from vfl.mpc.rules import NAMES
from vfl.session.handshake import check_version
from vfl.triple.plan import Facts, Plan, Terms, helps

_FACTS_BYTES = 1 << 14
_DIGEST_BYTES = 64
_HOLDERS = (0, 1)
_SAME_TERMS = "start all three parties with one experiment and the same options"
_SAME_ROWS = "keep only the ids all parties share, for example after a private set intersection"


def meet(party: Party, terms: Terms, data: PartyData | None) -> Plan:
    """Agree on terms, rows and keys; the plan that all three then follow.

    Args:
        party: without keys yet.
        terms: what this party was started with.
        data: its own rows; None at a helper, which learns numbers of rows and columns only.

    Raises:
        DisagreementError: another party was started otherwise, or holds shares of another training.
        MisalignedError: another party has other rows.
        BadOptionError: a batch has more rows than there are.
    """
    facts = _exchange(party, Facts.of(terms, data, secrets.token_hex(32)))
    for peer, found in enumerate(facts):
        check_version(found.version, NAMES[peer])
        _check_terms(terms, party.role, found.terms, peer)
    plan = Plan.of_facts(facts)
    session = plan.session(facts)
    if data is not None:
        _check_rows(party, plan, facts, data.row_digest(session))
    party.agree(plan.model_dump(mode="json"), session)
    return plan


def _exchange(party: Party, own: Facts) -> list[Facts]:
    """Everybody's facts, by role."""
    found = {party.role: own}
    for channel in party.channels.values():
        channel.send_bytes(own.model_dump_json().encode(), 0, "setup")
    for role, channel in party.channels.items():
        raw = bytes(channel.receive_bytes(0, 2, _FACTS_BYTES))
        try:
            found[role] = Facts.model_validate_json(raw)
        except ValidationError:
            raise ProtocolError(
                f"{NAMES[role]} introduced itself in another form than this version reads",
                fix="install the same vfl version at every party",
            ) from None
    return [found[role] for role in sorted(found)]


def _check_terms(own: Terms, role: int, other: Terms, peer: int) -> None:
    mine, theirs = own.model_dump(), other.model_dump()
    if own.training and other.training and own.training != other.training:
        raise DisagreementError(
            f"{NAMES[peer]} was given another training's network",
            where="shares of a private network",
            got=f"training {other.training[:12]} there",
            want=f"training {own.training[:12]}, as here",
            fix="give every party its own part of one training; parts of two do not add up",
        )
    differ = [name for name, value in mine.items() if theirs[name] != value]
    if helps(own, role) or helps(own, peer):  # who only helps follows what the others ask
        differ = [name for name in differ if name != "task"]
    if differ:
        raise DisagreementError(
            f"{NAMES[peer]} was started with other settings",
            where=", ".join(differ),
            got=", ".join(str(theirs[name]) for name in differ),
            want=", ".join(str(mine[name]) for name in differ),
            fix=_SAME_TERMS,
        )


def _check_rows(party: Party, plan: Plan, facts: Sequence[Facts], digest: str) -> None:
    """Compare rows with those of every other party that has some."""
    others = {
        role: channel
        for role, channel in party.channels.items()
        if role in _HOLDERS or role == plan.label_role
    }
    for role in others:
        _check_counts(facts[party.role], facts[role], NAMES[role])
    for channel in others.values():
        channel.send_bytes(digest.encode(), 0, "setup")
    for role, channel in others.items():
        raw = bytes(channel.receive_bytes(0, _DIGEST_BYTES))
        if not hmac.compare_digest(raw, digest.encode()):
            raise MisalignedError(
                f"the tables of {NAMES[role]} and {NAMES[party.role]} hold different ids",
                got=f"{facts[role].rows} rows at both, but another digest of their ids",
                want="the same ids, written the same way, at every party",
                fix=f"check the id column's type, and {_SAME_ROWS}",
            )
        party.leakage.count("digest of row ids", NAMES[role], facts[role].rows, facts[role].rows)


def _check_counts(own: Facts, other: Facts, peer: str) -> None:
    mine, theirs = (_counts(each) for each in (own, other))
    if mine != theirs:
        raise MisalignedError(
            f"the table of {peer} has other rows than this party's",
            got=", ".join(f"{count} {name}" for name, count in theirs.items()),
            want=", ".join(f"{count} {name}" for name, count in mine.items()),
            fix=_SAME_ROWS,
        )


def _counts(facts: Facts) -> Mapping[str, int]:
    return {"rows": facts.rows, "to train on": facts.train_rows, "to test on": facts.test_rows}
