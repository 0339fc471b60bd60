"""The label party's HTTP service, on top of a session that stays open; see docs/serving.md.

A session of mode ``serve`` has no schedule: the label party queries rows whenever clients request
them (`vfl.session.serving`). A client's request passes through these files:

    serving/front.py     token, limits, ids -> positions
    serving/service.py   waiting requests -> one batch; both on the event loop of HTTP
    session/label/asking.py  ASK to every party   ==> clients/serving.py   counted, or REFUSAL
    session/label/party.py   the same query as of a prediction  <==   QUERY

`Client` (serving/client.py) sends requests over HTTP. The file serving/clients.py manages the
authorised clients, and serving/inference.py implements the Open Inference Protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfl.core import lazy_names

if TYPE_CHECKING:
    from vfl.serving.client import Client

__all__ = ["Client"]

__getattr__ = lazy_names(__name__)
