"""Makes the three parties of a mode, one at a time or all in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vfl.core.frame import Link
from vfl.mpc.in_process import LocalParties
from vfl.mpc.rules import P2, Rules
from vfl.mpc.three_party.fast import FastDealer, FastHolder
from vfl.mpc.three_party.party import Party
from vfl.mpc.three_party.thesis import ThesisDealer, ThesisHolder


def make_party(role: int, links: Mapping[int, Link], rules: Rules) -> Party:
    """Make P0, P1 or P2 for a mode; the party gets its keys later, in `Party.agree`."""
    if rules.mode == "thesis":
        return (ThesisDealer if role == P2 else ThesisHolder)(role, links, rules)
    return (FastDealer if role == P2 else FastHolder)(role, links, rules)


class Trio(LocalParties[Party]):
    """All three parties of a mode as threads of this process.

    Args:
        rules: rules, equal at all parties.
        terms: settings that the parties compare before they begin to compute.
        timeout_s: seconds that a party waits for a message.
        agreed: whether the parties agree on keys when this object is made; False for a program that
            begins with `Party.agree`.
    """

    def __init__(
        self,
        rules: Rules,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
        *,
        agreed: bool = True,
    ) -> None:
        super().__init__(lambda role, links: make_party(role, links, rules), timeout_s)
        if agreed:
            self.agree(terms or {})
