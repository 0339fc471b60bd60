"""``vfl renew``: certificates and keys before they end, or once they are lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vfl.cli.output import say

if TYPE_CHECKING:
    from vfl.config import PartyFile


def renew(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PROJECT|party.toml",
            help="The project for its certificate, a party for its key.",
        ),
    ],
    authority: Annotated[
        bool, typer.Option("--authority", help="A new authority, for the next renewal to use.")
    ] = False,
    identity: Annotated[
        bool, typer.Option("--identity", help="A party's identity key for secure sums instead.")
    ] = False,
) -> None:
    """Renew the SuperLink's certificate, or replace a party's key.

    PROJECT, or its label folder: a new certificate for the SuperLink under the same authority; no
    party has to do anything. party.toml: a new key of that party's SuperNode, or with --identity
    the one the other feature parties know it by. docs/security.md has the whole procedure.
    """
    from vfl.config import is_party_file, read_party_file
    from vfl.project import LabelFolder
    from vfl.transport import renew_node_key, renew_server, replace_authority

    if not path.is_dir() and is_party_file(path):
        if authority:
            raise typer.BadParameter("only the label party has one", param_hint="--authority")
        party = read_party_file(path)
        if identity:
            _new_identity(party)
            return
        private = party.beside(party.node.key)
        public = private.with_name(f"{party.party}.pub")
        renew_node_key(private, public)
        say(f"wrote {private} and {public}")
        say(f"send {public.name} to the label party, for its folder keys")
        say("when its vfl superlink was restarted with it, the old key is worth nothing any more:")
        say("restart vfl supernode then")
        return
    if identity:
        raise typer.BadParameter("only a feature party has one", param_hint="--identity")
    certificates = LabelFolder.find(path).certificates
    if authority:
        replace_authority(certificates)
        say(f"{certificates / 'ca.pem'} trusts a new authority and the old one")
        say("give it to every party as its ca.pem, and let them restart vfl supernode")
        say("when all have: vfl renew PROJECT")
    else:
        days = renew_server(certificates)
        say(f"{certificates / 'server.pem'} is good for {days} days; restart vfl superlink")


def _new_identity(party: PartyFile) -> None:
    from vfl.mpc.identity import Identity

    private = party.beside(party.identity.key)
    public = private.with_name("identity.pub")
    new = Identity.fresh()
    new.public.keep_at(public)
    new.keep_at(private)
    say(f"wrote {private} and {public}")
    say(f"give {public.name} to every other feature party, by a way the label party does not")
    say(f"control; each keeps it as {party.identity.peers}/{party.party}.pub")
