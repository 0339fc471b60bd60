"""HTTP at the label party: routes, authentication, limits, and the server's thread."""

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
from ipaddress import ip_address
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
from vfl.core.address import Address
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
        LargeBodyError,
        Receive,
        Scope,
        Send,
        announces_at_most,
        http_config,
        read_body,
        replayed,
    )
except ImportError as absence:  # currently also installed as dependencies of Flower
    raise MissingPackageError(
        "serving needs packages that are not installed",
        got=str(absence.name),
        fix="pip install 'vfl[serve]'",
    ) from None

_TOKEN_FILE, SETTINGS_FILE = "serve.token", "serve.json"
#: Settings with the path of a file; in a party's own file, such a path is relative to that file.
_FILES = frozenset({"token", "certificate", "key", "client_ca"})
#: Paths that need no token, because they disclose no data of parties or clients.
_OPEN = ("/", "/health", "/ready", inference.LIVE, inference.READY)
#: Limits on requests from a source without a token: enough for health checks, the page, and a few
#: wrong tokens.
_STRANGERS = FrontLimits(per_second=20.0, burst=20.0)
PREDICT = "/predict"


class LeadSettings(ServeSettings):
    """Settings of the leading label party's service.

    Attributes:
        tasks: additional label parties that answer their own clients at the same time, each at the
            address in its own file; if one process runs all parties, the single label party that
            answers in place of the leading one.
    """

    tasks: tuple[str, ...] = ()


def _whole(number: float) -> float | int:
    """Convert a whole number in any JSON form, such as 15775678.0, to an integer."""
    return int(number) if number.is_integer() else number


#: Type of an id: a text, or a number, as an alignment reads ids in a table.
_Id = str | int | Annotated[float, Field(allow_inf_nan=False), AfterValidator(_whole)]


class Asked(BaseModel):
    """The body of `POST /predict`.

    Attributes:
        ids: ids of rows in the label party's own table.
        columns: the label party's own columns for these rows, by name, which replace the values in
            its table.
        explain: whether the answer should contain each party's contribution for the first row.
    """

    model_config = ConfigDict(strict=True)

    ids: Annotated[list[_Id], Field(min_length=1)]
    columns: dict[str, list[str | int | float | None]] | None = None
    explain: bool = False


class Guard:
    """ASGI middleware that checks token, request rate and size before a request is parsed.

    A request with a token counts against the token's limits. Any other request counts against its
    source's limits, which are low, so that strangers cannot take capacity from clients. A client
    with an expired token is still recognised; it has the same low limits, but its source is not
    locked out.

    Args:
        app: application that handles all requests except queries about rows.
        questions: object that answers queries about rows directly; the routing of `app` would take
            as long as the model.
        clients: authorised clients, which send their tokens as `Authorization: Bearer TOKEN`.
        settings: limits of the service.
        figures: counters, for example of refused requests.
        front: rules for sources without a valid token.
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
        refusal = self._refusal(scope, headers, client, most)
        body: bytes | None = b""
        if refusal is None:
            try:
                body = await read_body(receive, most, self._settings.timeout_s, scope)
            except LargeBodyError:
                refusal = _refused("the body is too large", 413, "size")
            except TimeoutError:
                refusal = _refused("the body did not arrive in time", 408, "slow")
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
        self, scope: Scope, headers: dict[bytes, bytes], client: Caller | None, most: int
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
        if not announces_at_most(scope, most):
            return _refused("the body is too large", 413, "size")
        return None

    def _source(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Return the source of a request: the caller, or the client that a trusted proxy names."""
        client = scope["client"][0] if scope.get("client") else ""
        if not self._front.trusts(client):
            return client
        last = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        try:
            return str(ip_address(last))
        except ValueError:
            return client


class Rows:
    """Rows that clients can query: positions of ids, and the encoding of own columns.

    Args:
        data: the label party's data; an id may have any spelling that `data.id_rules` normalises to
            the same text.
    """

    def __init__(self, data: PartyData) -> None:
        rows = data.split.test
        ids = [str(each) for each in (rows if data.ids is None else data.ids[rows]).tolist()]
        self._at = dict(zip(ids, rows.tolist(), strict=True))
        self._id_rules, self._alike = data.id_rules, self._at
        keys = _alike(ids, data.id_rules)
        # two ids of an unaligned table may become equal; then neither can be queried in this form
        if keys != ids:
            counts = Counter(keys)
            pairs = zip(keys, rows.tolist(), strict=True)
            self._alike = {key: row for key, row in pairs if counts[key] == 1}
        self._encoder = data.encoder

    def __len__(self) -> int:
        return len(self._at)

    def positions(self, ids: Sequence[str | float]) -> list[int] | None:
        """Return the positions of ids; None if some id is unknown."""
        texts = [str(each) for each in ids]
        try:
            return [self._at[each] for each in texts]
        except KeyError:  # no exact match; the id may be in a different spelling
            pass
        try:
            alike = _alike(id_texts(pd.Series(ids, dtype=object)), self._id_rules)
            known = zip(texts, alike, strict=True)
            return [self._at[each] if each in self._at else self._alike[key] for each, key in known]
        except KeyError:
            return None

    def inputs(self, columns: dict[str, list[Any]], rows: int) -> Tensor | None:
        """Encode the label party's columns of a request; return None if the columns do not fit."""
        if self._encoder is None or set(columns) != set(self._encoder.names):
            return None
        if any(len(cells) != rows for cells in columns.values()):
            return None
        try:
            return torch.from_numpy(self._encoder.transform(pd.DataFrame(columns)))
        # the error's text may quote a cell
        except (VFLError, ValueError, TypeError, OverflowError):
            return None

    @property
    def columns(self) -> list[str]:
        """Names of the label party's own columns."""
        return [] if self._encoder is None else [str(name) for name in self._encoder.names]


def _alike(ids: list[str] | np.ndarray, rules: str) -> list[str]:
    """Return ids after the normalisation rules of an alignment."""
    return [key.decode() for key in normalise(np.array(ids, dtype=object), rules)]


@dataclass(frozen=True, eq=False)
class Model:
    """The run that is served.

    Attributes:
        version: name of the run.
        rows: rows that can be queried.
        classes: names of the classes; None for a regression.
        parties: names of all parties, the label party last; answers may state which parties were
            missing, and their contributions.
        decimals: number of decimals of probabilities; None does not round.
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
        """See `Served.as_json`; scores are as in `vfl predict`; regressions are not rounded."""
        if self._class_texts is None:
            numbers = outputs[:, 0].tolist()
            return [f'{{"prediction":{one}}}' if math.isfinite(one) else None for one in numbers]
        return [self._scored(row) for row in torch.softmax(outputs, dim=1).tolist()]

    @cached_property
    def _class_texts(self) -> list[str] | None:
        """Names of the classes as JSON texts."""
        return None if self.classes is None else [*map(_ENCODER.encode, self.classes)]

    def _scored(self, shares: list[float]) -> str | None:
        """Return one row's answer from its probabilities; None if a probability is NaN."""
        if not math.isfinite(sum(shares)) or self._class_texts is None:
            return None
        prediction = self._class_texts[shares.index(max(shares))]
        numbers = ",".join(map(repr, _rounded(shares, self.decimals)))
        return f'{{"prediction":{prediction},"probabilities":[{numbers}]}}'

    @cached_property
    def head(self) -> str:
        """First part of every answer."""
        return f'{{"version":{json.dumps(self.version)},"predictions":['

    def answer_bytes(self, rows: int, explain: bool) -> int:
        """Return the fixed length of an answer with this many rows; spaces pad shorter answers.

        TLS encrypts an answer but reveals the answer's length, which otherwise would depend on the
        name of the class and on the digits of its probability.
        """
        fixed, explained, each = self._most_bytes
        return fixed + rows * each + (explained if explain else 0)

    @cached_property
    def _most_bytes(self) -> tuple[int, int, int]:
        """Return the largest sizes of an answer's common part, of contributions, and of one row."""
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
    """Return the size of JSON with spaces after its separators, in bytes."""
    return len(json.dumps(content, ensure_ascii=False).encode())


class _Predictions(Response):
    """An HTTP response with predictions; it is built faster than the general class `Response`.

    Args:
        answered: JSON.
        most: size in bytes up to which the answer is padded by spaces.
        binary: binary tensors that follow the JSON and its padding.
    """

    _JSON = (b"content-type", b"application/json")
    _BINARY = (b"content-type", b"application/octet-stream")

    def __init__(self, answered: bytes, most: int, binary: bytes = b"") -> None:
        assert len(answered) + len(binary) <= most, "a field of an answer is not counted"
        body = answered.ljust(most - len(binary)) + binary
        self.status_code, self.body, self.background = 200, body, None
        self.raw_headers = [(b"content-length", b"%d" % most), self._JSON]
        if binary:  # the number of digits must not disclose anything either
            digits = b"%0*d" % (len(str(most)), most - len(binary))
            self.raw_headers[1:] = [self._BINARY, (inference.JSON_BYTES, digits)]


def application(desk: Desk, settings: ServeSettings) -> FastAPI:
    """Build the routes of the service; `Questions` answers queries about rows.

    Args:
        desk: object that knows the service which answers now, with its `Model`.
        settings: limits of the service.
    """
    app = FastAPI(title="vfl", version=VERSION, docs_url=None, redoc_url=None)
    page = resources.files("vfl.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """Return an HTML page for people."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        policy += "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return that the process is alive."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Return whether rows can be answered, or else which parties are missing."""
        service = desk.now
        missing = service.missing
        body: dict[str, Any] = {"ready": missing is None}
        body |= {} if missing is None else {"party": missing}
        body |= {"without": service.absent} if service.absent else {}
        return JSONResponse(body, 200 if missing is None else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(generate_latest(desk.now), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/model")
    async def model() -> JSONResponse:
        """Return a description of the model: run, classes, parties, own columns."""
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
        """Return scores of rows, in the order of their ids."""
        raise AssertionError("a guard in front answers this route, because it knows the client")

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
        """Return that the process is alive."""
        return {"live": True}

    @app.get(inference.READY)
    async def server_ready() -> JSONResponse:
        """Return whether rows can be answered."""
        here = desk.now.missing is None
        return JSONResponse({"live": True, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> JSONResponse:
        """Return whether rows can be answered with this model."""
        try:
            _require_model(_shown(desk.now), name, version)
        except (_RefusedQuestion, Unavailable):
            return JSONResponse({"name": name, "ready": False}, 404)
        here = desk.now.missing is None
        return JSONResponse({"name": name, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> Response:
        """Return the model's inputs and outputs."""
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
        """Return scores of rows as tensors, in the order of their ids."""
        raise AssertionError("a guard in front answers this route, because it knows the client")


class _RefusedQuestion(Exception):
    """Error for a query that gets no answer; the attribute `response` states the reason."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def _shown(service: Service) -> Model:
    """Return the model that is served now.

    Raises:
        Unavailable: no model is served yet.
    """
    if not isinstance(service.model, Model):
        raise Unavailable(service.owner, "it is starting")
    return service.model


def _require_model(now: Model, name: str, version: str | None) -> None:
    """Raise an error if a request is for another model, or for another run of the model.

    Raises:
        _RefusedQuestion: the request names another model or another run.
    """
    if name != now.owner:
        raise _RefusedQuestion(_refused(f"the model here is '{now.owner}'", 404, "model"))
    if version not in (None, now.version):
        raise _RefusedQuestion(_refused(f"the version here is '{now.version}'", 404, "version"))


class Questions:
    """Answers clients' queries about rows.

    Args:
        desk: object that knows the service which answers now, with its `Model`.
        settings: limits of the service.
        budgets: counts of the rows and requests that clients may still query.
    """

    def __init__(self, desk: Desk, settings: ServeSettings, budgets: Budgets) -> None:
        self._desk, self._settings, self._budgets = desk, settings, budgets

    async def answer(
        self, path: str, body: bytes, client: Caller, headers: Mapping[bytes, bytes]
    ) -> Response:
        """Answer `POST /predict`, or an inference request of the Open Inference Protocol."""
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
        except ValidationError:  # the error's text quotes the request
            raise _RefusedQuestion(_ill_formed(_FORM)) from None
        result = await self._result(asked, client, service, now)
        more = f'"milliseconds":{1000 * (time.perf_counter() - started):.3f}'
        if result.contributions:
            shares = {
                name: _rounded(value.tolist(), now.decimals)
                for name, value in result.contributions.items()
            }
            more += f',"contributions":{json.dumps(shares)}'
        # The rows are JSON texts already, because a batch encodes its rows once for all of its
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
            raise _RefusedQuestion(_ill_formed("the body has fewer bytes of JSON than announced"))
        try:
            request = inference.InferenceRequest.read(body, json_bytes)
            most = inference.empty_bytes(request, *about)
            asked = Asked.model_validate(request.question())
        except inference.FormError as mistake:
            raise _RefusedQuestion(_ill_formed(str(mistake))) from None
        except ValidationError:  # the error's text quotes the request
            raise _RefusedQuestion(_ill_formed("ids must be texts or whole numbers")) from None
        result = await self._result(asked, client, service, now)
        rows = [json.loads(row) for row in result.rows]
        whole, binary = inference.response(request, *about, rows)
        answered = json.dumps(whole, ensure_ascii=False)
        # In this protocol a remark is a JSON text inside a JSON text, in which each character may
        # take two bytes.
        most += now.answer_bytes(len(rows), False) + 2 * len(rows) * (service.remark_bytes + 2)
        return _Predictions(answered.encode(), most, binary)

    async def _result(self, asked: Asked, client: Caller, service: Service, now: Model) -> Result:
        """Return the answers for the rows of a query.

        Raises:
            _RefusedQuestion: the query exceeds the limits or the client's budget, or its rows or
                columns do not exist in the model.
            Unavailable: see `Service.predict`.
        """
        settings = self._settings
        if len(asked.ids) > settings.max_ids:
            raise _RefusedQuestion(_refused(f"more than {settings.max_ids} ids", 413, "size"))
        if asked.explain and not settings.explain:
            what = "this service does not disclose contributions (vfl serve --explain does)"
            raise _RefusedQuestion(_refused(what, 403, "explain"))
        found = now.rows.positions(asked.ids)
        if found is None:
            raise _RefusedQuestion(_refused("an id is not known here", 404, "id"))
        inputs = None
        if asked.columns is not None:
            inputs = now.rows.inputs(asked.columns, len(asked.ids))
            if inputs is None or len(set(found)) < len(found):
                what = "the columns are not those of the label party's model, or an id occurs twice"
                raise _RefusedQuestion(_ill_formed(what))
        if (spent := self._budgets.take(client, len(found))) is not None:
            most = self._budgets.most(client)[COUNTED.index(spent)]
            what = f"more than {most} {spent} of this token in a day"
            raise _RefusedQuestion(_refused(what, 429, spent, self._budgets.resets_in_s))
        try:
            return await service.predict(now, found, inputs, asked.explain)
        except Unavailable:
            self._budgets.give_back(client, len(found))
            raise


#: Machine-readable codes for the reasons of `Unavailable`.
_CODES = {403: "consent", 429: "party", 503: "away"}
_FORM = "the body is not {ids: [...], columns?: {...}, explain?: bool}"


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
    """Holds the service that gets new queries; it is changed only on the event loop.

    Attributes:
        now: the service that gets new queries; earlier queries are answered by an earlier service.
    """

    now: Service

    def take_over(self, service: Service) -> None:
        """Direct new queries to another service from now on."""
        before, self.now = self.now, service
        if before is not service:
            before.retire()


class _Server(HttpServer):
    """HTTP server; the services of one group run on its event loop."""

    def __init__(self, config: uvicorn.Config, desk: Desk, front: Front) -> None:
        super().__init__(config, front)
        self._desk = desk

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Prepare the current service before the server accepts connections."""
        self._desk.now.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class HttpFront(ServingFront):
    """A service with its own address and HTTP server.

    Args:
        owner: name of the label party that owns the service.
        settings: settings of the service.
        folder: folder of the run that is served first. Its `serving.json` contains the address, its
            `serving.stop` ends the service, and its `serving.next` names the next run.
        ended: function that is called at intervals, and returns whether the service should end.
        clients: folder with the list of clients and their counts; None uses `folder`.

    Raises:
        RunFolderError: the list of clients or their counts are damaged.
        UserError: the service cannot listen at the address, or the address is open to other
            machines without TLS.
    """

    def __init__(
        self,
        owner: str,
        settings: ServeSettings,
        folder: Path,
        ended: Callable[[], bool] = lambda: False,
        clients: Path | None = None,
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
        kept = clients or folder / FOLDER
        self.service = self._make(opened=self._opened)
        self._desk = Desk(self.service)
        token_file = Path(settings.token or folder / _TOKEN_FILE)
        named = Clients(kept, owner)
        shown = "the tokens from vfl clients"
        if settings.token or token_file.exists() or not named.entries():
            plain = tuple(Caller.of_token(token) for token in tokens_in(token_file))
            named, shown = Clients(kept, owner, plain), f"the token in {token_file}"
        self._decimals = _limit(settings.probability_decimals)
        self._budgets = Budgets(kept, owner, _limit(settings.max_rows_per_day))
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
        self.welcome = f"listens at {self.address}; clients show {shown}"
        self._tell()

    @classmethod
    def open_lead(cls, party: PartyFile, run: str) -> HttpFront:
        """See `ServingFront.open_lead`; settings come from the party's file and `vfl serve`."""
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
        return cls(party.party, settings, folder, clients=party.store_path / FOLDER)

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> HttpFront:
        """See `ServingFront.open_task`; settings come from [serve] in the party's own file."""
        kept = party.store_path / FOLDER
        return cls(party.party, settings_of(party, {}), folder, ended, kept)

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """Set the model that the next session serves; see `Model`."""
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
        """Return whether the current model has been able to answer at least once."""
        return self.service.was_ready

    def successor(self) -> HttpFront:
        """See `ServingFront.successor`."""
        following = copy(self)
        # Meanwhile the current run answers.
        following.service = self._make(opened=following._opened, waits=False)
        following.service.loop = self.service.loop
        return following

    def play(self, serving: ServingParty) -> None:
        """See `Service.play`."""
        if self._desk.now is self.service:  # no other run answers, so requests wait for this run
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
        """Start answering with this run; `vfl promote` waits until the file names this run."""
        self._desk.take_over(service)
        self._tell_run()

    def _tell_run(self) -> None:
        stored = running_service(self._state.parent)
        if stored is None or stored.run != self._run:
            with suppress(StorageError):  # a full disk must not prevent answers
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


def _listening(settings: ServeSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except UserError as refused:
        refused.what = "cannot listen for clients"
        refused.fix = (
            "choose another port (--port, or port in the [serve] of a party's own file), or 0"
        )
        raise


def settings_of(party: PartyFile | None, options: Mapping[str, Any]) -> LeadSettings:
    """Return a service's settings: `[serve]` of the party's file, overridden by options.

    Args:
        party: the party's own file; None if one process runs every party.
        options: options given to `vfl serve`.

    Raises:
        ConfigError: a value is out of range.
        UserError: a certificate has no key, or clients' certificates are required without TLS.
    """
    said = dict[str, Any]()
    if party is not None and party.serve is not None:
        said = party.serve.model_dump(exclude_unset=True)
        for each in _FILES & said.keys():
            if said[each] is not None:
                said[each] = str(party.beside(said[each]))
    settings = check(said | dict(options), LeadSettings, "the options of vfl serve, or [serve]")
    if (settings.certificate is None) is not (settings.key is None):
        raise UserError("certificate and key of the service belong together")
    if settings.client_ca is not None and settings.certificate is None:
        raise UserError("clients' certificates need a certificate and key of the service")
    return settings


def settings_file(folder: Path, settings: ServeSettings) -> None:
    """Store settings in a file, for the process that serves."""
    write_json(folder / SETTINGS_FILE, json.loads(settings.model_dump_json(exclude_unset=True)))
