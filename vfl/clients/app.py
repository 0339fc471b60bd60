"""The Flower app of an invited party: each session message from Flower starts a whole session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vfl.clients.session import take_part
from vfl.config import PartyFile, read_party_file
from vfl.core.errors import (
    ConfigError,
    ProtocolError,
    VFLError,
    redacted_output,
    redacted_traceback,
)
from vfl.core.products import products
from vfl.core.registry import named
from vfl.core.text import printable
from vfl.session import SessionMessage, for_others, rules, unexpected


def client_app() -> ClientApp:
    """Return the ClientApp, which is the same for all projects.

    The party's own file sets the limits. A SuperNode names the party's own file in its option
    ``--node-config 'party-file="..."'``. In a simulation, nodes have no configuration; the setting
    ``party-files`` then names the project's folder.
    """
    app = ClientApp()

    @app.train("session")
    def session(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        with redacted_output():
            answer = play(message.content, context)
        return Message(RecordDict({"session": answer}), reply_to=message)

    for product in products().values():
        for path in product.client_apps:
            named(path)(app, lambda context: _own_file(context, None))
    return app


def play(content: Mapping[str, Any], context: Context) -> ConfigRecord:
    """Run one party's whole session.

    Return the party's report, or the error that ended the session.
    """
    failure: dict[str, str | None] = {}
    report, name = "", f"of node {context.node_id}"
    try:
        asked = SessionMessage.parse(_text_of(content))
        party = _own_file(context, asked)
        name = party.party
        _say(f"party {name} takes part in {asked.terms.run}")
        report = take_part(asked, party, _say).model_dump_json()
        _say(f"party {name} has completed its part of {asked.terms.run}")
    except VFLError as error:
        print(error, flush=True)
        failure = for_others(error, name).record()
    except Exception as bug:
        print(redacted_traceback(bug), flush=True)
        told = unexpected(bug, name)
        print(told, flush=True)
        failure = told.record()
    return ConfigRecord({"report": report, "failure": json.dumps(failure)})


def _text_of(content: Mapping[str, Any]) -> str:
    try:
        return str(content["session"]["message"])
    except (KeyError, TypeError):
        raise ProtocolError("this Flower message belongs to no session of vfl") from None


def _say(line: str) -> None:
    print(f"vfl: {printable(line)}", flush=True)


def _own_file(context: Context, asked: SessionMessage | None) -> PartyFile:
    if named := context.node_config.get("party-file"):
        return read_party_file(Path(str(named)))
    folder, position = (
        context.run_config.get("party-files"),
        context.node_config.get("partition-id"),
    )
    if not folder or position is None or asked is None:
        raise ConfigError(
            "this SuperNode's configuration does not name the party's own file",
            want="--node-config 'party-file=\"/path/to/party.toml\"'",
            fix="start the SuperNode with: vfl up party.toml",
        )
    name = rules.peers(asked.terms)[int(position)]
    return read_party_file(Path(str(folder)) / name / "party.toml")
