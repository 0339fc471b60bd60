"""HTTP at the label party: routes, who may ask, limits; and the server in its thread."""

from __future__ import annotations

import asyncio
import json
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
from vfl.transport.front import Front, FrontLimits, RateLimiter, welcome
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
except ImportError as absence:  # they come with Flower today
    raise MissingPackageError(
        "serving needs packages that are not here",
        got=str(absence.name),
        fix="pip install 'vfl[serve]'",
    ) from None

_TOKEN_FILE, SETTINGS_FILE = "serve.token", "serve.json"
#: Settings that name a file; in a party's own file its path is relative to that.
_FILES = frozenset({"token", "certificate", "key", "client_ca"})
#: Paths that tell nothing of anybody's data, and need no token.
_OPEN = ("/", "/health", "/ready", inference.LIVE, inference.READY)
#: What a source may ask without a token: health checks, the page, a few wrong tokens.
_STRANGERS = FrontLimits(per_second=20.0, burst=20.0)
PREDICT = "/predict"


class LeadSettings(ServeSettings):
    """How the label party that leads serves.

    Attributes:
        tasks: further label parties that answer their own clients meanwhile, each at the address
            that its own file says; in one process the one whose task is answered instead.
    """

    tasks: tuple[str, ...] = ()


def _whole(number: float) -> float | int:
    """A whole number as one, however JSON writes it: 15775678.0."""
    return int(number) if number.is_integer() else number


#: A text, or a number as an alignment reads one in a table.
_Id = str | int | Annotated[float, Field(allow_inf_nan=False), AfterValidator(_whole)]


class Asked(BaseModel):
    """The body of `POST /predict`.

    Attributes:
        ids: of rows in the label party's own table.
        columns: the label party's own columns of these rows in place of its table's, by name.
        explain: also tell what each party contributed to the first row.
    """

    model_config = ConfigDict(strict=True)

    ids: Annotated[list[_Id], Field(min_length=1)]
    columns: dict[str, list[str | int | float | None]] | None = None
    explain: bool = False


class Guard:
    """In front of the application: token, rate and size, before anything is parsed.

    A request with a token is counted for its token, any other for its source, which is allowed
    little: strangers take nothing from clients, wherever they ask from. Whoever shows a token that
    has expired is a known client, who is allowed as little, and whose source is not locked out.

    Args:
        app: what is guarded.
        questions: answers those about rows, without the routing of `app`, which takes as long as a
            model.
        clients: who may ask; they show their tokens as `Authorization: Bearer TOKEN`.
        settings: the limits.
        figures: where refusals are counted.
        front: what is allowed without a token.
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
        """One request, as ASGI hands it over."""
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
                body = await read_body(receive, most, self._settings.timeout_s)
            except LargeBodyError:
                refusal = _refused("the body is too large", 413, "size")
            except TimeoutError:
                refusal = _refused("the body did not come in time", 408, "slow")
        if body is None:
            return
        if refusal is not None:
            self._figures.add("responses", status=str(refusal.status_code))
            await refusal(scope, receive, send)
            return
        path = scope["path"]
        if scope["method"] == "POST" and (path == PREDICT or inference.INFER.fullmatch(path)):
            assert client is not None, "refused without a token"
            answer = await self._questions.answer(path, body, client)
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
                what = "too many requests without a good token from this address"
                return _refused(what, 429, "rate", retry_after_s=1)
            if scope["path"] not in _OPEN:
                self._front.failed(source)
                return _refused("the token is missing or wrong", 401, "token")
        else:
            over = self._clients.is_over(client)
            if not over:
                welcome(scope)
            if not (self._late if over else self._rate).allow(client.name):
                what = "too many requests of this token"
                return _refused(what, 429, "rate", retry_after_s=1)
            if over and scope["path"] not in _OPEN:
                self._figures.add("expired_requests", client=client.name)
                return _refused("the token has expired", 401, "expired")
        if not announces_at_most(scope, most):
            return _refused("the body is too large", 413, "size")
        return None

    def _source(self, scope: Scope, headers: dict[bytes, bytes]) -> str:
        """Who asks: the caller, or whom a proxy that is trusted names."""
        client = scope["client"][0] if scope.get("client") else ""
        if not self._front.trusts(client):
            return client
        last = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        try:
            return str(ip_address(last))
        except ValueError:
            return client


class Rows:
    """The rows that can be asked for: where an id stands, and what its own columns become.

    Args:
        data: the label party's rows; an id may be written in any way that `data.id_rules` reads
            alike.
    """

    def __init__(self, data: PartyData) -> None:
        rows = data.split.test
        ids = [str(each) for each in (rows if data.ids is None else data.ids[rows]).tolist()]
        self._at = dict(zip(ids, rows.tolist(), strict=True))
        self._id_rules, self._alike = data.id_rules, self._at
        keys = _alike(ids, data.id_rules)
        if keys != ids:  # of a table that was not aligned, two ids may be alike: neither is meant
            counts = Counter(keys)
            pairs = zip(keys, rows.tolist(), strict=True)
            self._alike = {key: row for key, row in pairs if counts[key] == 1}
        self._encoder = data.encoder

    def __len__(self) -> int:
        return len(self._at)

    def positions(self, ids: Sequence[str | float]) -> list[int] | None:
        """Positions of ids; None where one is not known."""
        texts = [str(each) for each in ids]
        try:
            return [self._at[each] for each in texts]
        except KeyError:  # as letter by letter none is written, or as no rule writes it
            pass
        try:
            alike = _alike(id_texts(pd.Series(ids, dtype=object)), self._id_rules)
            known = zip(texts, alike, strict=True)
            return [self._at[each] if each in self._at else self._alike[key] for each, key in known]
        except KeyError:
            return None

    def inputs(self, columns: dict[str, list[Any]], rows: int) -> Tensor | None:
        """The label party's inputs from columns of a request; None where they do not fit."""
        if self._encoder is None or set(columns) != set(self._encoder.names):
            return None
        if any(len(cells) != rows for cells in columns.values()):
            return None
        try:
            return torch.from_numpy(self._encoder.transform(pd.DataFrame(columns)))
        except (VFLError, ValueError, TypeError, OverflowError):  # which may quote a cell
            return None

    @property
    def columns(self) -> list[str]:
        """Names of the label party's own columns."""
        return [] if self._encoder is None else [str(name) for name in self._encoder.names]


def _alike(ids: list[str] | np.ndarray, rules: str) -> list[str]:
    """Ids as an alignment by these rules compares them."""
    return [key.decode() for key in normalise(np.array(ids, dtype=object), rules)]


@dataclass(frozen=True, eq=False)
class Model:
    """What is served: one run.

    Attributes:
        version: name of the run.
        rows: which can be asked for.
        classes: what outputs stand for; None for a regression.
        parties: all of them, the label party last: whose cuts may be missing, and whose
            contributions may be told.
        decimals: of probabilities; None is all.
    """

    version: str
    rows: Rows
    classes: Classes | None
    parties: tuple[str, ...] = ()
    decimals: int | None = None

    @property
    def owner(self) -> str:
        """The label party, whose model this is."""
        return self.parties[-1]

    def as_json(self, outputs: Tensor) -> list[str | None]:
        """See `Served.as_json`."""
        return [_json(row) for row in scores(outputs, self.classes, self.decimals)]

    @cached_property
    def head(self) -> str:
        """How every answer begins."""
        return f'{{"version":{json.dumps(self.version)},"predictions":['

    def answer_bytes(self, rows: int, explain: bool) -> int:
        """Most bytes of an answer about so many rows; spaces fill every answer up to it.

        TLS hides what an answer says and shows how long it is: the name of the class, digits of
        its probability.
        """
        fixed, explained, each = self._most_bytes
        return fixed + rows * each + (explained if explain else 0)

    @cached_property
    def _most_bytes(self) -> tuple[int, int, int]:
        """Of what every answer has, of contributions, and of a row."""
        numbers = [_LONGEST_NUMBER] * (1 if self.classes is None else len(self.classes))
        whole = {"version": self.version, "predictions": [], "milliseconds": _LONGEST_NUMBER}
        row: dict[str, Any] = {"prediction": _LONGEST_NUMBER, "missing": self.parties}
        if self.classes is not None:
            row |= {"prediction": max(self.classes, key=_json_bytes), "probabilities": numbers}
        fixed = _json_bytes(whole | {"contributions": {}})
        shared = _json_bytes(dict.fromkeys(self.parties, numbers)) - _json_bytes({})
        return fixed, shared, _json_bytes(row) + 1


#: No number takes more letters.
_LONGEST_NUMBER = -sys.float_info.max
#: Of an answer's rows; it refuses a number that is none.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json(content: Mapping[str, Any]) -> str | None:
    """As JSON; None where that has a number that is none."""
    try:
        return _ENCODER.encode(content)
    except ValueError:
        return None


def _json_bytes(content: Any) -> int:
    """Bytes of JSON with spaces behind its signs."""
    return len(json.dumps(content, ensure_ascii=False).encode())


class _Predictions(Response):
    """An answer with rows, made without what `Response` does for any content.

    Args:
        answered: JSON.
        most: bytes to which spaces fill it.
    """

    _JSON = (b"content-type", b"application/json")

    def __init__(self, answered: bytes, most: int) -> None:
        assert len(answered) <= most, "a field of an answer is not counted"
        body = answered.ljust(most)
        self.status_code, self.body, self.background = 200, body, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), self._JSON]


def application(desk: Desk, settings: ServeSettings) -> FastAPI:
    """The routes; `Questions` answers what is asked about rows.

    Args:
        desk: says which service answers them, with the `Model` it has.
        settings: the limits.
    """
    app = FastAPI(title="vfl", version=VERSION, docs_url=None, redoc_url=None)
    page = resources.files("vfl.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        """A page for a person."""
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        policy += "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process lives."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether rows can be answered; if not, who is missing."""
        service = desk.now
        missing = service.missing
        body: dict[str, Any] = {"ready": missing is None}
        body |= {} if missing is None else {"party": missing}
        body |= {"without": service.absent} if service.absent else {}
        return JSONResponse(body, 200 if missing is None else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(generate_latest(desk.now), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/model")
    async def model() -> JSONResponse:
        """What answers: the run, its classes, its parties, the label party's own columns."""
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

    def body_of(form: type[BaseModel]) -> dict[str, Any]:
        schema = {"content": {"application/json": {"schema": form.model_json_schema()}}}
        return {"requestBody": {**schema, "required": True}}

    @app.post(PREDICT, openapi_extra=body_of(Asked))
    async def predict() -> None:
        """Scores of rows, in the order of their ids."""
        raise AssertionError("a guard in front answers it, who knows the client")

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """The server, as the Open Inference Protocol describes one."""
        return inference.server_metadata()

    @app.get(inference.LIVE)
    async def live() -> dict[str, bool]:
        """Whether the process lives."""
        return {"live": True}

    @app.get(inference.READY)
    async def server_ready() -> JSONResponse:
        """Whether rows can be answered."""
        here = desk.now.missing is None
        return JSONResponse({"live": True, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}/ready")
    @app.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> JSONResponse:
        """Whether rows can be answered with this model."""
        try:
            _require_model(_shown(desk.now), name, version)
        except (_RefusedQuestion, Unavailable):
            return JSONResponse({"name": name, "ready": False}, 404)
        here = desk.now.missing is None
        return JSONResponse({"name": name, "ready": here}, 200 if here else 503)

    @app.get("/v2/models/{name}")
    @app.get("/v2/models/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> Response:
        """What goes into the model and comes out of it."""
        try:
            now = _shown(desk.now)
            _require_model(now, name, version)
        except _RefusedQuestion as refusal:
            return refusal.response
        except Unavailable as absence:
            return _refused(absence.why, 503, "away")
        known = inference.model_metadata(name, now.version, now.rows.columns, now.classes)
        return JSONResponse(known)

    form = body_of(inference.InferenceRequest)

    @app.post("/v2/models/{name}/infer", openapi_extra=form)
    @app.post("/v2/models/{name}/versions/{version}/infer", openapi_extra=form)
    async def infer(name: str, version: str | None = None) -> None:
        """Scores of rows as tensors, in the order of their ids."""
        raise AssertionError("a guard in front answers it, who knows the client")

    return app


class _RefusedQuestion(Exception):
    """A question that gets no answer; `response` says why."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def _shown(service: Service) -> Model:
    """What is served now.

    Raises:
        Unavailable: nothing yet.
    """
    if not isinstance(service.model, Model):
        raise Unavailable(service.owner, "it is starting")
    return service.model


def _require_model(now: Model, name: str, version: str | None) -> None:
    """Refuse another model than the one that is served, or another run of it.

    Raises:
        _RefusedQuestion: it is another one.
    """
    if name != now.owner:
        raise _RefusedQuestion(_refused(f"the model here is '{now.owner}'", 404, "model"))
    if version not in (None, now.version):
        raise _RefusedQuestion(_refused(f"the version here is '{now.version}'", 404, "version"))


class Questions:
    """Answers what clients ask about rows.

    Args:
        desk: says which service answers, with the `Model` it has.
        settings: the limits.
        budgets: rows and requests that clients may ask for.
    """

    def __init__(self, desk: Desk, settings: ServeSettings, budgets: Budgets) -> None:
        self._desk, self._settings, self._budgets = desk, settings, budgets

    async def answer(self, path: str, body: bytes, client: Caller) -> Response:
        """The answer to `POST /predict`, or to an inference request of the protocol."""
        by_protocol, service = inference.INFER.fullmatch(path), self._desk.now
        try:
            now = _shown(service)
            if by_protocol is None:
                return await self._predicted(body, client, service, now)
            _require_model(now, *by_protocol.groups())
            return await self._inferred(body, client, service, now)
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
        except ValidationError:  # which quotes what it was sent
            raise _RefusedQuestion(_ill_formed(_FORM)) from None
        result = await self._result(asked, client, service, now)
        more = f'"milliseconds":{1000 * (time.perf_counter() - started):.3f}'
        if result.contributions:
            shares = {
                name: _rounded(value.tolist(), now.decimals)
                for name, value in result.contributions.items()
            }
            more += f',"contributions":{json.dumps(shares)}'
        # Rows are JSON already: those of a batch are written once, whoever asked for them.
        answered = f"{now.head}{','.join(result.rows)}],{more}}}".encode()
        most = now.answer_bytes(len(asked.ids), asked.explain)
        return _Predictions(answered, most + len(asked.ids) * service.remark_bytes)

    async def _inferred(
        self, body: bytes, client: Caller, service: Service, now: Model
    ) -> Response:
        about = now.owner, now.version, now.classes
        try:
            request = inference.InferenceRequest.read(body)
            most = inference.empty_bytes(request, *about)
            asked = Asked.model_validate(request.question())
        except inference.FormError as mistake:
            raise _RefusedQuestion(_ill_formed(str(mistake))) from None
        except ValidationError:  # which quotes what it was sent
            raise _RefusedQuestion(_ill_formed("ids are texts or whole numbers")) from None
        result = await self._result(asked, client, service, now)
        rows = [json.loads(row) for row in result.rows]
        answered = json.dumps(inference.response(request, *about, rows), ensure_ascii=False)
        # A remark is a text there, in which each sign may take two.
        most += now.answer_bytes(len(rows), False) + 2 * len(rows) * (service.remark_bytes + 2)
        return _Predictions(answered.encode(), most)

    async def _result(self, asked: Asked, client: Caller, service: Service, now: Model) -> Result:
        """What rows of a question are answered.

        Raises:
            _RefusedQuestion: more than the settings or the client's budget allow, or rows and
                columns that the model has not.
            Unavailable: see `Service.predict`.
        """
        settings = self._settings
        if len(asked.ids) > settings.max_ids:
            raise _RefusedQuestion(_refused(f"more than {settings.max_ids} ids", 413, "size"))
        if asked.explain and not settings.explain:
            what = "contributions are not told: --explain"
            raise _RefusedQuestion(_refused(what, 403, "explain"))
        found = now.rows.positions(asked.ids)
        if found is None:
            raise _RefusedQuestion(_refused("an id is not known here", 404, "id"))
        inputs = None
        if asked.columns is not None:
            inputs = now.rows.inputs(asked.columns, len(asked.ids))
            if inputs is None or len(set(found)) < len(found):
                what = "the columns are not those of the label party's model, or an id came twice"
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


#: What `Unavailable` says to a program.
_CODES = {403: "consent", 429: "party", 503: "away"}
_FORM = "the body is not {ids: [...], columns?: {...}, explain?: bool}"


def _ill_formed(why: str) -> JSONResponse:
    return _refused(why, 422, "form")


def _refused(why: str, status: int, code: str, retry_after_s: int | None = None) -> JSONResponse:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse({"error": why, "code": code}, status, headers)


def scores(
    outputs: Tensor, classes: Classes | None, decimals: int | None = None
) -> list[dict[str, Any]]:
    """What outputs of axes (rows, outputs) say, as `vfl predict` writes it.

    Args:
        outputs: of the label party's top model.
        classes: what they stand for; None for a regression, whose numbers are not rounded.
        decimals: to which probabilities are rounded; None tells them whole.
    """
    if classes is None:
        return [{"prediction": float(value)} for value in outputs[:, 0]]
    shares = torch.softmax(outputs, dim=1)
    best = shares.argmax(dim=1).tolist()
    return [
        {"prediction": classes[index], "probabilities": _rounded(row, decimals)}
        for index, row in zip(best, shares.tolist(), strict=True)
    ]


def _rounded(values: list[float], decimals: int | None) -> list[float]:
    return values if decimals is None else [round(value, decimals) for value in values]


def _limit(setting: int | Literal["off"]) -> int | None:
    return None if setting == "off" else setting


@dataclass(slots=True)
class Desk:
    """Which service takes what is asked; changed on the event loop alone.

    Attributes:
        now: that service; whoever has asked another one gets its answer from that.
    """

    now: Service

    def take_over(self, service: Service) -> None:
        """Let a service take what is asked from here on."""
        before, self.now = self.now, service
        if before is not service:
            before.retire()


class _Server(HttpServer):
    """An HTTP server whose loop the services of a desk run on."""

    def __init__(self, config: uvicorn.Config, desk: Desk, front: Front) -> None:
        super().__init__(config, front)
        self._desk = desk

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Before anybody is listened to."""
        self._desk.now.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class HttpFront(ServingFront):
    """A service that listens.

    Args:
        owner: the label party.
        settings: how it listens.
        folder: of the run that is served first; its `serving.json` says where it listens, its
            `serving.stop` ends it, and its `serving.next` names the run to go on with.
        ended: asked now and then whether something else ends it.
        clients: where clients and what they asked for are kept; in `folder` if not given.

    Raises:
        RunFolderError: clients, or what they asked for, are not as they were written.
        UserError: the address cannot be listened on, or is open to others without TLS.
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
            opened=lambda service: self._desk.take_over(service),
        )
        kept = clients or folder / FOLDER
        self.service = self._make()
        self._desk = Desk(self.service)
        token_file = Path(settings.token or folder / _TOKEN_FILE)
        named = Clients(kept, owner)
        shown = "the tokens that vfl clients gave"
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
        """See `ServingFront.open_lead`: as the party's file and what `vfl serve` left there say."""
        folder = party.run_path(run)
        path, options = folder / SETTINGS_FILE, dict[str, Any]()
        if path.exists():
            try:
                left = LeadSettings.model_validate(read_json(path))
            except ValueError:
                raise RunFolderError(
                    "settings of the service cannot be read", where=str(path)
                ) from None
            options = left.model_dump(exclude_unset=True)
        settings = settings_of(party, options)
        return cls(party.party, settings, folder, clients=party.store_path / FOLDER)

    @classmethod
    def open_task(cls, party: PartyFile, folder: Path, ended: Callable[[], bool]) -> HttpFront:
        """See `ServingFront.open_task`: it listens as [serve] of the party's own file says."""
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
        """What the next session serves; see `Model`."""
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
        """Whether the model that is shown has answered, or could have."""
        return self.service.was_ready

    def successor(self) -> HttpFront:
        """See `ServingFront.successor`."""
        following = copy(self)
        following.service = self._make(waits=False)  # the run before answers meanwhile
        following.service.loop = self.service.loop
        return following

    def play(self, serving: ServingParty) -> None:
        """See `Service.play`."""
        told = running_service(self._state.parent)
        if told is None or told.run != self._run:
            with suppress(StorageError):  # a full disk keeps nobody from an answer
                self._tell(run=self._run)
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
        """Stop listening; closing twice is harmless."""
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
    """How a label party serves: as `[serve]` of its own file says, unless an option says otherwise.

    Args:
        party: its file; None where one process plays every party.
        options: of `vfl serve`, those that were given.

    Raises:
        ConfigError: a value out of its range.
        UserError: a certificate without its key, or clients' certificates without TLS.
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
    """Leave settings that were given where the process that serves finds them."""
    write_json(folder / SETTINGS_FILE, json.loads(settings.model_dump_json(exclude_unset=True)))
