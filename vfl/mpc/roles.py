"""Which class plays which of the three parties."""

from __future__ import annotations

from collections.abc import Mapping

from vfl.link import Link
from vfl.mpc.fast import FastHolder
from vfl.mpc.fast_helper import FastHelper
from vfl.mpc.party import Party
from vfl.mpc.rules import P2, Rules
from vfl.mpc.thesis import ThesisHelper, ThesisHolder


def make_party(role: int, links: Mapping[int, Link], rules: Rules) -> Party:
    """P0, P1 or P2 of a mode; it has no keys before `Party.agree`."""
    if rules.mode == "thesis":
        return (ThesisHelper if role == P2 else ThesisHolder)(role, links, rules)
    return (FastHelper if role == P2 else FastHolder)(role, links, rules)
