"""HTTP server of a label party's service: routes, authentication, limits, and its thread."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from pydantic import AfterValidator, Field
from torch import Tensor

from vfl.config import PartyFile, ServeSettings
from vfl.config.toml import check
from vfl.core.address import Address, parse_ip
from vfl.core.errors import (
    MissingPackageError,
    RunFolderError,
    StorageError,
    UserError,
    VFLError,
)
from vfl.core.storage import read_json, write_json
from vfl.core.version import VERSION
from vfl.datasets import PartyData
from vfl.datasets.alignment.ids import normalise
from vfl.datasets.table import Classes, id_texts
from vfl.serving import inference
from vfl.serving.clients import COUNTED, FOLDER, Budgets, Caller, Clients, tokens_in
from vfl.serving.service import Figures, Result, Service, Unavailable
from vfl.session.drift import Drift
from vfl.session.label.asking import ServingParty
from vfl.session.label.front import ServingFront
from vfl.training.promotion import NEXT_FILE, STATE_FILE, STOP_FILE, running_service
from vfl.transport.front import Front, FrontLimits, RateLimiter, welcome, whole_number
from vfl.transport.stream import listen, require_loopback

try:
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from pydantic import BaseModel, ConfigDict, ValidationError

    from vfl.transport.http import (
        HttpServer,
        Receive,
        RefusedBodyError,
        Scope,
        Send,
        http_config,
        read_body,
        replayed,
    )
except ImportError as absence:  # these packages are at present also dependencies of Flower
    raise MissingPackageError(
        "serving needs packages that are not installed",
        got=str(absence.name),
        fix="pip install 'vfl[serve]'",
    ) from None

_TOKEN_FILE, SETTINGS_FILE = "serve.token", "serve.json"
#: Settings that contain the path of a file; in a party's own file, a relative path is relative to
#: the folder of that file.
_FILES = frozenset({"token", "certificate", "key", "client_ca"})
#: URL paths that need no token, because their responses disclose at most names of absent parties.
_OPEN = ("/", "/health", "/ready", inference.LIVE, inference.READY)
#: Limits for requests of a source without a valid token: enough for health checks, the page, and a
#: few wrong tokens.
_STRANGERS = FrontLimits(per_second=20.0, burst=20.0)
#: For the HTTP status of a refused body, the reason and the error code in the answer.
_BODY_REFUSALS = {413: ("is too large", "size"), 408: ("did not arrive in time", "slow")}
PREDICT = "/predict"


class LeadSettings(ServeSettings):
    """Settings of the leading label party's service.

    Attributes:
        tasks: further label parties that answer their own clients at the same time, each at the
            address in its own file; if one process runs all parties, this field names the only
            label party that answers, instead of the leading one.
    """

    tasks: tuple[str, ...] = ()


def _whole(number: float) -> float | int:
    """Convert a number without a fraction, such as 15775678.0 in JSON, to an integer."""
    return int(number) if number.is_integer() else number


#: Type of an id: a text or a number, as alignments read ids from a table.
_Id = str | int | Annotated[float, Field(allow_inf_nan=False), AfterValidator(_whole)]


class Asked(BaseModel):
    """The JSON body of `POST /predict`.

    Attributes:
        ids: ids of the rows to predict, as in the label party's own table.
        columns: values of the label party's columns for these rows, by column name; they replace
            the values in the label party's table.
        explain: whether the client requests each party's contribution to the answer for the first
            row.
    """

    model_config = ConfigDict(strict=True, extra="forbid")  # refuses misspelt fields

    ids: Annotated[list[_Id], Field(min_length=1)]
    columns: dict[str, list[str | int | float | None]] | None = None
    explain: bool = False


class Guard:
    """ASGI middleware that checks token, request rate and body size before a request is parsed.

    A request with a client's token is counted by the limits of this token. Any other request is
    counted by the limits of its source (IP address), which are low, so that unauthenticated clients
    cannot use up the capacity for other clients. A client whose token has expired is still
    recognised: the low limits apply to it, but its source is not blocked for other clients.

    Args:
        app: application that handles all requests except queries of rows.
        questions: object that answers queries of rows directly, because the routing in `app` would
            take as long as the computation of the model.
        clients: the authorised clients, which send their tokens in the header `Authorization:
            Bearer TOKEN`.
        settings: limits of the service.
        figures: counters of the service, for example of refused requests.
        front: rate limiter for sources without a valid token.
    """

    def __init__(
        self,
        app: FastAPI,
        questions: Questions,
        clients: Clients,
        settings: ServeSettings,
        figures: Figures,
        front: Front,
    ) -> None:
        self._app, self._questions, self._front = app, questions, front
        self._figures, self._settings = figures, settings
        self._clients, rate = clients, settings.max_requests_per_second
        self._rate = RateLimiter(rate, max(1.0, rate))
        self._late = RateLimiter(_STRANGERS.per_second, _STRANGERS.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; this is the ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        client = self._clients.of(token) if scheme == b"Bearer" else None
        most = self._settings.max_body_bytes
        if client is None:
            most = min(most, self._front.limits.head_bytes)
        refusal = self._refusal(scope, headers, client)
        body: bytes | None = b""
        if refusal is None:
            try:
                body = await read_body(scope, receive, most, self._settings.timeout_s)
            except RefusedBodyError as problem:
                what, code = _BODY_REFUSALS[problem.status]
                refusal = _refused(f"the body of the request {what}", problem.status, code)
        if body is None:
            return
        if refusal is not None:
            self._figures.add("responses", status=str(refusal.status_code))
            await refusal(scope, receive, send)
            return
        path = scope["path"]
        if scope["method"] == "POST" and (path == PREDICT or inference.INFER.fullmatch(path)):
            assert client is not None, "refused without a token"
            answer = await self._questions.answer(path, body, client, headers)
            self._figures.add("responses", status=str(answer.status_code))
            await answer(scope, receive, send)
            return

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._figures.add("responses", status=str(message["status"]))
            await send(message)

        await self._app(scope, replayed(body, receive), counted)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, bytes], client: Caller | None
    ) -> Response | None:
        if client is None:
            source = self._source(scope, headers)
            if not self._front.allow(source):
                what = "too many requests without a valid token from this address"
                return _refused(what, 429, "rate", retry_after_s=1)
            if scope["path"] not in _OPEN:
                self._front.failed(source)
                return _refused("the token is missing or wrong", 401, "token")
        else:
            over = self._clients.is_over(client)
            if not over:
                welcome(scope)
            if not (self._late if over else self._rate).allow(client.name):
                what = "too many requests with this token"
                return _refused(what, 429, "rate", retry_after_s=1)
            if over and scope["path"] not in _OPEN:
                self._figures.add("expired_requests", client=client.name)
                return _refused("the token has expired", 401, "expired")
        return None

    def _source(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return a request's source: the caller's address, or the one a trusted proxy states."""
        client = scope["client"][0] if scope.get("client") else ""
        if not self._front.trusts(client):
            return client
        last = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        stated = parse_ip(last)
        return client if stated is None else str(stated)


class Rows:
    """Rows that clients can query: their positions by id, and the encoding of inputs.

    Args:
        data: the label party's data; a client may use any spelling of an id that `data.id_rules`
            normalises to the same text as the table's id.
    """

    def __init__(self, data: PartyData) -> None:
        rows = data.split.test
        ids = [str(each) for each in (rows if data.ids is None else data.ids[rows]).tolist()]
        self._at = dict(zip(ids, rows.tolist(), strict=True))
        self._id_rules, self._alike = data.id_rules, self._at
        keys = _alike(ids, data.id_rules)
        # without an alignment, two ids of the table may be normalised to the same text, which then
        # identifies no row
        if keys != ids:
            counts = Counter(keys)
            pairs = zip(keys, rows.tolist(), strict=True)
            self._alike = {key: row for key, row in pairs if counts[key] == 1}
        self._encoder = data.encoder

    def __len__(self) -> int:
        return len(self._at)

    def positions(self, ids: Sequence[str | float]) -> list[int] | None:
        """Return the positions of the rows with these ids; None if one of the ids is unknown."""
        texts = [str(each) for each in ids]
        try:
            return [self._at[each] for each in texts]
        except KeyError:  # no id is spelled exactly so; another spelling may be in the table
            pass
        try:
            alike = _alike(id_texts(pd.Series(ids, dtype=object)), self._id_rules)
            known = zip(texts, alike, strict=True)
            return [self._at[each] if each in self._at else self._alike[key] for each, key in known]
        except KeyError:
            return None

    def inputs(self, columns: dict[str, list[Any]], rows: int) -> Tensor | None:
        """Encode the label party's columns in a request.

        Return None if the columns do not fit the model.
        """
        if self._encoder is None or set(columns) != set(self._encoder.names):
            return None
        if any(len(cells) != rows for cells in columns.values()):
            return None
        try:
            return torch.from_numpy(self._encoder.transform(pd.DataFrame(columns)))
        # the error is not passed on, because its text may quote a value
        except (VFLError, ValueError, TypeError, OverflowError):
            return None

    @property
    def columns(self) -> list[str]:
        """Names of the label party's columns."""
        return [] if self._encoder is None else [str(name) for name in self._encoder.names]


def _alike(ids: list[str] | np.ndarray, rules: str) -> list[str]:
    """Return the ids as the normalisation rules of an alignment change them."""
    return [key.decode() for key in normalise(np.array(ids, dtype=object), rules)]


@dataclass(frozen=True, eq=False)
class Model:
    """The run that a service serves, as a model.

    Attributes:
        version: name of the served run.
        rows: rows that clients can query.
        classes: names of the label's classes; None for a regression.
        parties: names of all parties, the label party last; an answer may name missing parties, and
            state each party's contribution.
        decimals: number of decimals to which probabilities are rounded; None does not round.
    """

    version: str
    rows: Rows
    classes: Classes | None
    parties: tuple[str, ...] = ()
    decimals: int | None = None

    @property
    def owner(self) -> str:
        """Name of the label party, which owns the model."""
        return self.parties[-1]

    def as_json(self, outputs: Tensor) -> list[str | None]:
        """See `Served.as_json`; probabilities are rounded, the numbers of a regression are not."""
        if self._class_texts is None:
            numbers = outputs[:, 0].tolist()
            return [f'{{"prediction":{one}}}' if math.isfinite(one) else None for one in numbers]
        return [self._scored(row) for row in torch.softmax(outputs, dim=1).tolist()]

    @cached_property
    def _class_texts(self) -> list[str] | None:
        """Names of the classes, each encoded as JSON."""
        return None if self.classes is None else [*map(_ENCODER.encode, self.classes)]

    def _scored(self, shares: list[float]) -> str | None:
        """Return the answer for a row from its probabilities.

        The result is None if a probability is not finite.
        """
        if not math.isfinite(sum(shares)) or self._class_texts is None:
            return None
        prediction = self._class_texts[shares.index(max(shares))]
        numbers = ",".join(map(repr, _rounded(shares, self.decimals)))
        return f'{{"prediction":{prediction},"probabilities":[{numbers}]}}'

    @cached_property
    def head(self) -> str:
        """First part of every answer, as JSON."""
        return f'{{"version":{json.dumps(self.version)},"predictions":['

    def answer_bytes(self, rows: int, explain: bool) -> int:
        """Return the length in bytes of every answer with this many rows.

        Shorter answers are padded with spaces. TLS encrypts an answer, but not its length, which
        would otherwise depend on the class name and on the digits of the probabilities.
        """
        fixed, explained, each = self._most_bytes
        return fixed + rows * each + (explained if explain else 0)

    @cached_property
    def _most_bytes(self) -> tuple[int, int, int]:
        """Return the largest bytes of an answer's common part, its contributions, and a row."""
        numbers = [_LONGEST_NUMBER] * (1 if self.classes is None else len(self.classes))
        whole = {"version": self.version, "predictions": [], "milliseconds": _LONGEST_NUMBER}
        row: dict[str, Any] = {"prediction": _LONGEST_NUMBER, "missing": self.parties}
        if self.classes is not None:
            row |= {"prediction": max(self.classes, key=_json_bytes), "probabilities": numbers}
        fixed = _json_bytes(whole | {"contributions": {}})
        shared = _json_bytes(dict.fromkeys(self.parties, numbers)) - _json_bytes({})
        return fixed, shared, _json_bytes(row) + 1


#: The number whose JSON text is longest.
_LONGEST_NUMBER = -sys.float_info.max
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _json_bytes(content: Any) -> int:
    """Return the size in bytes of content as JSON with spaces after separators."""
    return len(json.dumps(content, ensure_ascii=False).encode())


class _Predictions(Response):
    """An HTTP response with predictions, which is built faster than by the base class `Response`.

    Args:
        answered: JSON.
        most: size in bytes to which the body is padded with spaces.
        binary: bytes of binary tensors that follow the JSON and its padding.
    """

    _JSON = (b"content-type", b"application/json")
    _BINARY = (b"content-type", b"application/octet-stream")

    def __init__(self, answered: bytes, most: int, binary: bytes = b"") -> None:
        assert len(answered) + len(binary) <= most, "the answer is not longer than its largest size"
        body = answered.ljust(most - len(binary)) + binary
        self.status_code, self.body, self.background = 200, body, None
        self.raw_headers = [(b"content-length", b"%d" % most), self._JSON]
        if binary:  # pad this number with zeros, so that its length discloses nothing, either
            digits = b"%0*d" % (len(str(most)), most - len(binary))
            self.raw_headers[1:] = [self._BINARY, (inference.JSON_BYTES, digits)]


def application(desk: Desk, settings: ServeSettings) -> FastAPI:
    """Build the application with all routes except queries of rows, which `Questions` answers.

    Args:
        desk: object that holds the service which answers at present, with its `Model`.
        settings: limits of the service.
    """
    app = FastAPI(title="vfl", version=VERSION, docs_url=None, redoc_url=None)
    page = resources.files("vfl.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """Return an HTML page for a person in a browser."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        policy += "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return a constant answer, which shows that the process runs."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Return whether the service can answer rows, and if not, which parties are missing."""
        service = desk.now
        missing = service.missing
        body: dict[str, Any] = {"ready": missing is None}
        body |= {} if missing is None else {"party": missing}
        body |= {"without": service.absent} if service.absent else {}
        return JSONResponse(body, 200 if missing is None else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return the service's metrics in Prometheus's text format."""
        return Response(generate_latest(desk.now), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/model")
    async def model() -> JSONResponse:
        """Return a description of the model: run, classes, parties, and columns."""
        service = desk.now
        try:
            now = _shown(service)
        except Unavailable as absence:
            told = {"error": absence.why, "code": "away", "party": absence.party}
            return JSONResponse(told, 503)
        about = {
            "version": now.version,
            "classes": None if now.classes is None else list(now.classes),
            "parties": service.parties,
            "columns": now.rows.columns,
            "rows": len(now.rows),
            "explains": settings.explain,
            "decimals": now.decimals,
            "max_ids": settings.max_ids,
        }
        return JSONResponse(about)

    @app.post(PREDICT, openapi_extra=_body_of(Asked))
    async def predict() -> None:
        """Return predictions for rows, in the order of the ids in the request."""
        raise AssertionError("`Guard` answers this route, because it knows the client")

    _add_open_inference(app, desk)
    return app


def _body_of(form: type[BaseModel]) -> dict[str, Any]:
    schema = {"content": {"application/json": {"schema": form.model_json_schema()}}}
    return {"requestBody": {**schema, "required": True}}


def _add_open_inference(app: FastAPI, desk: Desk) -> None:
    """Add the routes of the Open Inference Protocol."""

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Return the server's description, in the format of the Open Inference Protocol."""
        return inference.server_metadata()

    @app.get(inference.LIVE)
    async def live() -> dict[str, bool]:
        """Return a constant answer, which shows that the process runs."""
        return {"live": True}

    @app.get(inference.READY)
    async def server_ready() -> JSONResponse:
        """Return whether the service can answer rows."""
        here = desk.now.missing is None
        return JSONResponse({"live": True, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> JSONResponse:
        """Return whether the service can answer rows with the model in the path."""
        try:
            _require_model(_shown(desk.now), name, version)
        except (_RefusedQuestion, Unavailable):
            return JSONResponse({"name": name, "ready": False}, 404)
        here = desk.now.missing is None
        return JSONResponse({"name": name, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> Response:
        """Return names and shapes of the model's inputs and outputs."""
        try:
            now = _shown(desk.now)
            _require_model(now, name, version)
        except _RefusedQuestion as refusal:
            return refusal.response
        except Unavailable as absence:
            return _refused(absence.why, 503, "away")
        known = inference.model_metadata(name, now.version, now.rows.columns, now.classes)
        return JSONResponse(known)

    form = _body_of(inference.InferenceRequest)

    @app.post("/v2/models/{name}/infer", openapi_extra=form)
    @app.post("/v2/models/{name}/versions/{version}/infer", openapi_extra=form)
    async def infer(name: str, version: str | None = None) -> None:
        """Return predictions for rows as tensors, in the order of the ids in the request."""
        raise AssertionError("`Guard` answers this route, because it knows the client")


class _RefusedQuestion(Exception):
    """Error: a query of rows gets no answer; the attribute `response` contains the reason."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def _shown(service: Service) -> Model:
    """Return the model that a service serves at present.

    Raises:
        Unavailable: the service serves no model yet.
    """
    if not isinstance(service.model, Model):
        raise Unavailable(service.owner, "it is starting")
    return service.model


def _require_model(now: Model, name: str, version: str | None) -> None:
    """Refuse a request that names a different model, or a different run of this model.

    Raises:
        _RefusedQuestion: the request names a different model or run.
    """
    if name != now.owner:
        raise _RefusedQuestion(
            _refused(f"the name of the model here is '{now.owner}'", 404, "model")
        )
    if version not in (None, now.version):
        raise _RefusedQuestion(
            _refused(f"the version of the model here is '{now.version}'", 404, "version")
        )


class Questions:
    """Answers clients' queries of rows.

    Args:
        desk: object that holds the service which answers at present, with its `Model`.
        settings: limits of the service.
        budgets: counts of the rows and requests that clients have queried, for their daily budgets.
    """

    def __init__(self, desk: Desk, settings: ServeSettings, budgets: Budgets) -> None:
        self._desk, self._settings, self._budgets = desk, settings, budgets

    async def answer(
        self, path: str, body: bytes, client: Caller, headers: Mapping[bytes, bytes]
    ) -> Response:
        """Answer `POST /predict`, or an inference request (Open Inference Protocol)."""
        by_protocol, service = inference.INFER.fullmatch(path), self._desk.now
        try:
            now = _shown(service)
            if by_protocol is None:
                return await self._predicted(body, client, service, now)
            _require_model(now, *by_protocol.groups())
            return await self._inferred(body, headers, client, service, now)
        except _RefusedQuestion as refusal:
            return refusal.response
        except Unavailable as absence:
            told = {
                "error": f"party {absence.party}: {absence.why}",
                "code": _CODES[absence.status],
                "party": absence.party,
            }
            return JSONResponse(told, absence.status, {"Retry-After": "1"})

    async def _predicted(
        self, body: bytes, client: Caller, service: Service, now: Model
    ) -> Response:
        started = time.perf_counter()
        try:
            asked = Asked.model_validate_json(body)
        except ValidationError:  # the error is not passed on, because its text quotes the request
            raise _RefusedQuestion(_ill_formed(_FORM)) from None
        result = await self._result(asked, client, service, now)
        more = f'"milliseconds":{1000 * (time.perf_counter() - started):.3f}'
        if result.contributions:
            shares = {
                name: _rounded(value.tolist(), now.decimals)
                for name, value in result.contributions.items()
            }
            more += f',"contributions":{json.dumps(shares)}'
        # Each row is already encoded as JSON, because a batch encodes its rows once for all of its
        # clients.
        answered = f"{now.head}{','.join(result.rows)}],{more}}}".encode()
        most = now.answer_bytes(len(asked.ids), asked.explain)
        return _Predictions(answered, most + len(asked.ids) * service.remark_bytes)

    async def _inferred(
        self,
        body: bytes,
        headers: Mapping[bytes, bytes],
        client: Caller,
        service: Service,
        now: Model,
    ) -> Response:
        about, told = (now.owner, now.version, now.classes), headers.get(inference.JSON_BYTES)
        json_bytes = None if told is None else whole_number(told, len(body))
        if told is not None and json_bytes is None:
            raise _RefusedQuestion(
                _ill_formed("the body contains fewer bytes of JSON than its header announces")
            )
        try:
            request = inference.InferenceRequest.read(body, json_bytes)
            most = inference.empty_bytes(request, *about)
            asked = Asked.model_validate(request.question())
        except inference.FormError as mistake:
            raise _RefusedQuestion(_ill_formed(str(mistake))) from None
        except ValidationError:  # the error is not passed on, because its text quotes the request
            what = "there must be ids, and all ids and columns must be texts or numbers"
            raise _RefusedQuestion(_ill_formed(what)) from None
        result = await self._result(asked, client, service, now)
        rows = [json.loads(row) for row in result.rows]
        whole, binary = inference.response(request, *about, rows)
        answered = json.dumps(whole, ensure_ascii=False)
        # In this protocol, the model's remark on a row is a JSON text within a JSON text, in which
        # each character may need two bytes.
        most += now.answer_bytes(len(rows), False) + 2 * len(rows) * (service.remark_bytes + 2)
        return _Predictions(answered.encode(), most, binary)

    async def _result(self, asked: Asked, client: Caller, service: Service, now: Model) -> Result:
        """Return the answers for the rows of a query.

        Raises:
            _RefusedQuestion: the query exceeds the service's limits or the client's budget, or
                names rows or columns that the model does not have.
            Unavailable: see `Service.predict`.
        """
        settings = self._settings
        if len(asked.ids) > settings.max_ids:
            raise _RefusedQuestion(_refused(f"more than {settings.max_ids} ids", 413, "size"))
        if asked.explain and not settings.explain:
            what = (
                "this service does not disclose contributions of parties to a prediction "
                "(start it with vfl serve --explain)"
            )
            raise _RefusedQuestion(_refused(what, 403, "explain"))
        found = now.rows.positions(asked.ids)
        if found is None:
            raise _RefusedQuestion(_refused("this service does not know one of the ids", 404, "id"))
        inputs = None
        if asked.columns is not None:
            inputs = now.rows.inputs(asked.columns, len(asked.ids))
            if inputs is None or len(set(found)) < len(found):
                what = (
                    "the columns or their values do not fit the label party's model, or an id "
                    "occurs twice"
                )
                raise _RefusedQuestion(_ill_formed(what))
        if (spent := self._budgets.take(client, len(found))) is not None:
            most = self._budgets.most(client)[COUNTED.index(spent)]
            what = f"the daily budget of this token, {most} {spent}, is used up"
            raise _RefusedQuestion(_refused(what, 429, spent, self._budgets.resets_in_s))
        try:
            return await service.predict(now, found, inputs, asked.explain)
        except Unavailable:
            self._budgets.give_back(client, len(found))
            raise


#: Codes of errors in answers, which clients' programs read, by the HTTP status of `Unavailable`.
_CODES = {403: "consent", 429: "party", 503: "away"}
_FORM = "the body of the request is not {ids: [...], columns?: {...}, explain?: bool}"


def _ill_formed(why: str) -> JSONResponse:
    return _refused(why, 422, "form")


def _refused(why: str, status: int, code: str, retry_after_s: int | None = None) -> JSONResponse:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse({"error": why, "code": code}, status, headers)


def _rounded(values: list[float], decimals: int | None) -> list[float]:
    return values if decimals is None else [round(value, decimals) for value in values]


def _limit(setting: int | Literal["off"]) -> int | None:
    return None if setting == "off" else setting


@dataclass(slots=True)
class Desk:
    """Holds the service that receives new queries; only the event loop may change the object.

    Attributes:
        now: the service that receives new queries; an earlier service still answers the queries
            that it has received.
    """

    now: Service

    def take_over(self, service: Service) -> None:
        """From now on, pass new queries to another service."""
        before, self.now = self.now, service
        if before is not service:
            before.retire()


class _Server(HttpServer):
    """HTTP server, on whose event loop all services of one front run."""

    def __init__(self, config: uvicorn.Config, desk: Desk, front: Front) -> None:
        super().__init__(config, front)
        self._desk = desk

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Pass the event loop to the current service before the server accepts connections."""
        self._desk.now.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class HttpFront(ServingFront):
    """A label party's service with its own network address and HTTP server.

    Args:
        owner: name of the label party that owns the service.
        settings: settings of the service.
        folder: folder of the run with which the service starts. In this folder, `serving.json`
            contains the service's address, `serving.stop` ends the service, and `serving.next`
            names the next run.
        ended: function that the service calls repeatedly; it returns whether the service must end.
        party: the party's own file, whose store contains the list of clients and their counts; None
            if one process trained the run, whose folder then contains both.

    Raises:
        RunFolderError: the list of clients or the file of their counts is damaged.
        UserError: the service cannot listen at the address, other machines could reach it without
            TLS, or the token file is unsafe or has no token.
    """

    def __init__(
        self,
        owner: str,
        settings: ServeSettings,
        folder: Path,
        ended: Callable[[], bool] = lambda: False,
        party: PartyFile | None = None,
    ) -> None:
        self._run: str | None = None
        self.partial = settings.partial
        self.tasks = settings.tasks if isinstance(settings, LeadSettings) else ()
        if settings.certificate is None:
            require_loopback(settings.host)
        self._state, self._next = folder / STATE_FILE, folder / NEXT_FILE
        stop = folder / STOP_FILE
        for stale in (stop, self._next):
            stale.unlink(missing_ok=True)
        self._desk: Desk
        self._make = partial(
            Service,
            owner,
            wait_ms=settings.wait_ms,
            timeout_s=settings.timeout_s,
            cache_rows=settings.cache_rows,
            ended=lambda: ended() or stop.exists(),
            figures=Figures(),
        )
        kept = folder / FOLDER if party is None else party.store_path / FOLDER
        self.service = self._make(opened=self._opened)
        self._desk = Desk(self.service)
        named, shown = _admitted(kept, owner, settings.token, folder / _TOKEN_FILE)
        self._decimals = _limit(settings.probability_decimals)
        rows = _limit(settings.max_rows_per_day)
        self._budgets = (
            Budgets(kept, owner, rows) if party is None else Budgets.of_party(party, rows)
        )
        questions = Questions(self._desk, settings, self._budgets)
        front, app = Front(_STRANGERS, settings.trusted_proxy), application(self._desk, settings)
        guard = Guard(app, questions, named, settings, self.service.figures, front)
        config = http_config(guard, settings.certificate, settings.key, settings.client_ca)
        listening = _listening(settings)
        self.port = int(listening.getsockname()[1])
        self._server = _Server(config, self._desk, front)
        self._server.start(listening, "vfl-http")
        scheme = "http" if settings.certificate is None else "https"
        self.address = f"{scheme}://{Address(settings.host, self.port)}"
        self.welcome = f"listens at {self.address}; clients must send {shown}"
        self._tell()

    @classmethod
    def open_lead(cls, party: PartyFile, run: str) -> HttpFront:
        """See `ServingFront.open_lead`.

        The settings are those of the party's file and of `vfl serve`.
        """
        folder = party.run_path(run)
        path, options = folder / SETTINGS_FILE, dict[str, Any]()
        if path.exists():
            try:
                left = LeadSettings.model_validate(read_json(path))
            except ValueError:
                raise RunFolderError(
                    "the settings of the service cannot be read", where=str(path)
                ) from None
            options = left.model_dump(exclude_unset=True)
        settings = settings_of(party, options)
        return cls(party.party, settings, folder, party=party)

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> HttpFront:
        """See `ServingFront.open_task`.

        The settings are those of [serve] in the party's own file.
        """
        return cls(party.party, settings_of(party, {}), folder, ended, party)

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """Set the model for the next session; see `Model`."""
        self._run = version
        names = (*parties, self.service.owner)
        self.service.show(
            Model(version, Rows(data), classes, names, self._decimals), parties, drift
        )

    def following(self) -> Path | None:
        """See `ServingFront.following`."""
        if not self._next.exists():
            return None
        named = Path(self._next.read_text(encoding="utf-8").strip())
        self._next.unlink()
        return named

    @property
    def was_ready(self) -> bool:
        """Return whether the service of the current run has been able to answer at least once."""
        return self.service.was_ready

    def successor(self) -> HttpFront:
        """See `ServingFront.successor`."""
        following = copy(self)
        # Until the following run can answer, the current run answers.
        following.service = self._make(opened=following._opened, waits=False)
        following.service.loop = self.service.loop
        return following

    def play(self, serving: ServingParty) -> None:
        """See `Service.play`."""
        # no other run answers meanwhile, so requests wait for this run
        if self._desk.now is self.service:
            self._tell_run()
        self.service.play(serving)

    def retire(self) -> None:
        """See `ServingFront.retire`."""
        self.service.retire()

    def refused(self, run: str, error: VFLError) -> None:
        """See `ServingFront.refused`."""
        told = running_service(self._state.parent)
        now = None if told is None else told.run
        with suppress(StorageError):
            self._tell(run=now, refused={"run": run, "at": time.time(), **error.record()})

    def _opened(self, service: Service) -> None:
        """Answer with this run from now on.

        `vfl promote` waits until the file `serving.json` names this run.
        """
        self._desk.take_over(service)
        self._tell_run()

    def _tell_run(self) -> None:
        stored = running_service(self._state.parent)
        if stored is None or stored.run != self._run:
            with suppress(StorageError):  # if the disk is full, the service must still answer
                self._tell(run=self._run)

    def _tell(self, **more: Any) -> None:
        write_json(self._state, {"address": self.address, "process": os.getpid(), **more})

    def waits_for(self, parties: Sequence[str]) -> None:
        """See `Service.waits_for`."""
        self.service.waits_for(parties)

    def waits_for_alignment(self) -> None:
        """See `Service.waits_for_alignment`."""
        self.service.waits_for_alignment()

    def lost(self, error: VFLError) -> bool:
        """See `Service.lost`."""
        return self.service.lost(error)

    def close(self) -> None:
        """Stop listening; a second call has no effect."""
        self._desk.now.stop()
        self._server.stop()
        self._budgets.close()
        self._state.unlink(missing_ok=True)


def _admitted(kept: Path, owner: str, token: str | None, usual: Path) -> tuple[Clients, str]:
    """Return the clients of a service, and words for the user that name their tokens.

    Args:
        kept: folder of the list of clients.
        owner: party that owns the service.
        token: token file that the settings name; None if they name none.
        usual: token file that is used if it exists, or if the list is empty.
    """
    named, token_file = Clients(kept, owner), Path(token or usual)
    if not token and not token_file.exists() and named.entries():
        return named, "the tokens from vfl clients"
    plain = tuple(Caller.of_token(each) for each in tokens_in(token_file))
    return Clients(kept, owner, plain), f"the token in {token_file}"


def _listening(settings: ServeSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except UserError as refused:
        refused.what = "cannot listen for clients"
        refused.fix = (
            "choose another port (option --port, or port in [serve] of a party's own file), or 0 "
            "for any free port"
        )
        raise


def settings_of(party: PartyFile | None, options: Mapping[str, Any]) -> LeadSettings:
    """Return a service's settings: `[serve]` of the party's file, overridden by options.

    Args:
        party: the party's own file; None if one process runs every party.
        options: options that the user gave to `vfl serve`.

    Raises:
        ConfigError: a value is out of range.
        UserError: a certificate is given without its key, or clients' certificates are required
            without TLS.
    """
    said = dict[str, Any]()
    if party is not None and party.serve is not None:
        said = party.serve.model_dump(exclude_unset=True)
        for each in _FILES & said.keys():
            if said[each] is not None:
                said[each] = str(party.beside(said[each]))
    settings = check(said | dict(options), LeadSettings, "the options of vfl serve, or [serve]")
    if (settings.certificate is None) is not (settings.key is None):
        raise UserError("the service needs both a certificate and its key, or neither")
    if settings.client_ca is not None and settings.certificate is None:
        raise UserError(
            "if clients' certificates are required, the service needs a certificate and key of its "
            "own"
        )
    return settings


def settings_file(folder: Path, settings: ServeSettings) -> None:
    """Store the settings in a file, which the process of the service reads."""
    write_json(folder / SETTINGS_FILE, json.loads(settings.model_dump_json(exclude_unset=True)))
