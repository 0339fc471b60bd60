"""HTTP at the label party: routes, who may ask, limits; and the server in its thread."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import ssl
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from vfl.config import PartyFile, ServeSettings
from vfl.core.errors import MissingPackageError, RunFolderError, UserError, VFLError
from vfl.core.storage import read_json, write_json, write_text
from vfl.core.version import VERSION
from vfl.datasets import PartyData
from vfl.datasets.table import Classes
from vfl.server.serving import ServingParty
from vfl.serving.service import Service, Unavailable
from vfl.session.drift import Drift
from vfl.transport.stream import require_loopback

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from pydantic import BaseModel, ValidationError
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as absence:  # they come with Flower today
    raise MissingPackageError(
        "serving needs packages that are not here",
        got=str(absence.name),
        fix="pip install 'vfl[serve]'",
    ) from None

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_TOKEN_FILE, SETTINGS_FILE, STATE_FILE, STOP_FILE, NEXT_FILE = (
    "serve.token", "serve.json", "serving.json", "serving.stop", "serving.next",
)  # fmt: skip
#: Paths that tell nothing of anybody's data, and need no token.
_OPEN = ("/", "/health", "/ready")
_CLIENTS = 4096  # whose rate is remembered
_START_S = 10.0
PREDICT = "/predict"


class LeadSettings(ServeSettings):
    """How the label party that leads serves.

    Attributes:
        tasks: further label parties that answer their own clients meanwhile, each at the address
            that its own file says; in one process the one whose task is answered instead.
    """

    tasks: tuple[str, ...] = ()


def token_in(path: Path) -> str:
    """The token that clients show; made by the operating system's generator if there is none.

    Raises:
        UserError: others may read the file, or it holds no token.
    """
    if not path.exists():
        write_text(path, secrets.token_urlsafe(32) + "\n")
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        raise UserError(
            "others may read the token of the service",
            where=str(path),
            want="mode 0600",
            fix=f"chmod 600 {path}",
        )
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if len(token) < 16:
        raise UserError("this file holds no token", where=str(path), want="16 characters or more")
    return token


class Asked(BaseModel):
    """The body of `POST /predict`.

    Attributes:
        ids: of rows in the label party's own table.
        columns: the label party's own columns of these rows in place of its table's, by name.
        explain: also tell what each party contributed to the first row.
    """

    ids: Annotated[list[str | int], Field(min_length=1)]
    columns: dict[str, list[str | int | float | None]] | None = None
    explain: bool = False


class Guard:
    """In front of the application: token, rate and size, before anything is parsed.

    Args:
        app: what is guarded.
        predict: answers the body of `POST /predict` without the routing of `app`, which takes as
            long as a model.
        token: what clients show as `Authorization: Bearer TOKEN`.
        settings: the limits.
        service: where refusals are counted.
    """

    def __init__(
        self,
        app: FastAPI,
        predict: Callable[[bytes], Awaitable[Response]],
        token: str,
        settings: ServeSettings,
        service: Service,
    ) -> None:
        self._app, self._predict = app, predict
        self._service, self._settings = service, settings
        self._token = f"Bearer {token}".encode()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI hands it over."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        status, why = self._refusal(scope, headers)
        body, deadline = b"", time.monotonic() + self._settings.timeout_s
        while not status:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                status, why = 408, "the body did not come in time"
                break
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                status, why = 413, "the body is too large"
            elif not message.get("more_body", False):
                break
        if status:
            self._service.figures.add("responses_total", f'status="{status}"')
            await JSONResponse({"error": why}, status)(scope, receive, send)
            return
        if scope["path"] == PREDICT and scope["method"] == "POST":
            answer = await self._predict(body)
            self._service.figures.add("responses_total", f'status="{answer.status_code}"')
            await answer(scope, receive, send)
            return
        given = False

        async def whole() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._service.figures.add("responses_total", f'status="{message["status"]}"')
            await send(message)

        await self._app(scope, whole, counted)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str]:
        client = scope["client"][0] if scope.get("client") else ""
        if not self._allow(client):
            return 429, "too many requests from this address"
        shown = headers.get(b"authorization", b"")
        if not hmac.compare_digest(shown, self._token) and scope["path"] not in _OPEN:
            return 401, "the token is missing or wrong"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:12]) > self._settings.max_body_bytes:
            return 413, "the body is too large"
        return 0, ""

    def _allow(self, client: str) -> bool:
        now, rate = time.monotonic(), self._settings.max_requests_per_second
        burst = max(1.0, rate)
        tokens, at = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + (now - at) * rate)
        self._buckets[client] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)
        return tokens >= 1


class Rows:
    """The rows that can be asked for: where an id stands, and what its own columns become.

    Args:
        data: the label party's rows.
    """

    def __init__(self, data: PartyData) -> None:
        rows = data.split.test
        ids = rows.tolist() if data.ids is None else data.ids[rows].tolist()
        self._at = {str(each): row for each, row in zip(ids, rows.tolist(), strict=True)}
        self._encoder = data.encoder

    def __len__(self) -> int:
        return len(self._at)

    def positions(self, ids: list[str | int]) -> list[int] | None:
        """Positions of ids; None where one is not known."""
        try:
            return [self._at[str(each)] for each in ids]
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


@dataclass(frozen=True, eq=False)
class Model:
    """What is served: one run.

    Attributes:
        version: name of the run.
        rows: which can be asked for.
        classes: what outputs stand for; None for a regression.
    """

    version: str
    rows: Rows
    classes: Classes | None

    def as_json(self, outputs: Tensor) -> list[str | None]:
        """See `Served.as_json`."""
        return [_json(row) for row in scores(outputs, self.classes)]


def _json(content: Mapping[str, Any]) -> str | None:
    """As JSON; None where that has a number that is none."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return None


def application(
    service: Service, settings: ServeSettings
) -> tuple[FastAPI, Callable[[bytes], Awaitable[Response]]]:
    """The routes, and what the one that predicts does with a body.

    Args:
        service: answers them, with the `Model` it has now.
        settings: the limits.
    """

    async def answer(body: bytes) -> Response:
        try:
            return await _predicted(body, service, settings)
        except Unavailable as absence:
            told = {"error": f"party {absence.party}: {absence.why}", "party": absence.party}
            return JSONResponse(told, absence.status, {"Retry-After": "1"})

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
        missing = service.missing
        body: dict[str, Any] = {"ready": missing is None}
        body |= {} if missing is None else {"party": missing}
        body |= {"without": service.absent} if service.absent else {}
        return JSONResponse(body, 200 if missing is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counts for Prometheus."""
        return PlainTextResponse(service.metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/model")
    async def model() -> JSONResponse:
        """What answers: the run, its classes, its parties, the label party's own columns."""
        now = service.model
        if not isinstance(now, Model):
            return JSONResponse({"error": "it is starting", "party": service.owner}, 503)
        told = {
            "version": now.version,
            "classes": None if now.classes is None else list(now.classes),
            "parties": service.parties,
            "columns": now.rows.columns,
            "rows": len(now.rows),
            "explains": settings.explain,
        }
        return JSONResponse(told)

    schema = {"content": {"application/json": {"schema": Asked.model_json_schema()}}}

    @app.post(PREDICT, openapi_extra={"requestBody": {**schema, "required": True}})
    async def predict(request: Request) -> Response:
        """Scores of rows, in the order of their ids."""
        return await answer(await request.body())

    return app, answer


#: No number takes more letters.
_LONGEST_NUMBER = -sys.float_info.max


async def _predicted(body: bytes, service: Service, settings: ServeSettings) -> Response:
    """The answer to the body of a request.

    Raises:
        Unavailable: see `Service.predict`.
    """
    started, now = time.perf_counter(), service.model
    if not isinstance(now, Model):
        raise Unavailable(service.owner, "it is starting")
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError:  # which quotes what it was sent
        return _refused("the body is not {ids: [...], columns?: {...}, explain?: bool}", 422)
    if len(asked.ids) > settings.max_ids:
        return _refused(f"more than {settings.max_ids} ids", 413)
    if asked.explain and not settings.explain:
        return _refused("contributions are not told: --explain", 403)
    found = now.rows.positions(asked.ids)
    if found is None:
        return _refused("an id is not known here", 404)
    inputs = None
    if asked.columns is not None:
        inputs = now.rows.inputs(asked.columns, len(asked.ids))
        if inputs is None or len(set(found)) < len(found):
            what = "the columns are not those of the label party's model, or an id came twice"
            return _refused(what, 422)
    result = await service.predict(now, found, inputs, asked.explain)
    more: dict[str, Any] = {"milliseconds": round(1000 * (time.perf_counter() - started), 3)}
    if result.contributions:
        shares = {name: value.tolist() for name, value in result.contributions.items()}
        more["contributions"] = shares
    # Rows are JSON already: those of a batch are written once, whoever asked for them.
    head = f'{{"version":{json.dumps(now.version)},"predictions":[{",".join(result.rows)}],'
    body = (head + json.dumps(more)[1:]).encode()
    parties = [*service.parties, service.owner]
    size = _answer_bytes(now, parties, len(asked.ids), asked.explain)
    return Response(body.ljust(size), media_type="application/json")


def _answer_bytes(model: Model, parties: Sequence[str], rows: int, explain: bool) -> int:
    """Most bytes of an answer to a request like this; spaces fill every answer up to it.

    TLS hides what an answer says and shows how long it is: the name of the class, digits of its
    probability.

    Args:
        model: what answers.
        parties: whose cuts may be missing, and whose contributions may be told.
        rows: how many were asked for.
        explain: whether contributions are told.
    """
    numbers = [_LONGEST_NUMBER] * (1 if model.classes is None else len(model.classes))
    shared = dict.fromkeys(parties, numbers) if explain else {}
    whole = {"version": model.version, "predictions": [], "milliseconds": _LONGEST_NUMBER}
    row: dict[str, Any] = {"prediction": _LONGEST_NUMBER, "missing": parties}
    if model.classes is not None:
        row |= {"prediction": max(model.classes, key=_json_bytes), "probabilities": numbers}
    return _json_bytes(whole | {"contributions": shared}) + rows * (_json_bytes(row) + 1)


def _json_bytes(content: Any) -> int:
    """Bytes of JSON with spaces behind its signs."""
    return len(json.dumps(content, ensure_ascii=False).encode())


def _refused(why: str, status: int) -> JSONResponse:
    return JSONResponse({"error": why}, status)


def scores(outputs: Tensor, classes: Classes | None) -> list[dict[str, Any]]:
    """What outputs of axes (rows, outputs) say, as `vfl predict` writes it."""
    if classes is None:
        return [{"prediction": float(value)} for value in outputs[:, 0]]
    shares = torch.softmax(outputs, dim=1)
    best = shares.argmax(dim=1).tolist()
    return [
        {"prediction": classes[index], "probabilities": row}
        for index, row in zip(best, shares.tolist(), strict=True)
    ]


class _Joined:
    """A transport that writes what one turn of the loop gives it at once.

    The head and the body of an answer are two writes of uvicorn's, and the first wakes the client,
    which on a busy machine takes the processor from the second.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._held = transport, list[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP as uvicorn speaks it, an answer in one piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Joined(transport))


class _Server(uvicorn.Server):
    """An HTTP server whose loop a service runs on."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Before anybody is listened to."""
        self._service.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class HttpFront:
    """A service that listens; see `vfl.server.session.Front`.

    Args:
        owner: the label party.
        settings: how it listens.
        folder: of the run that is served first; its `serving.json` says where it listens, its
            `serving.stop` ends it, and its `serving.next` names the run to go on with.
        ended: asked now and then whether something else ends it.

    Raises:
        UserError: the address cannot be listened on, or is open to others without TLS.
    """

    def __init__(
        self,
        owner: str,
        settings: ServeSettings,
        folder: Path,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tasks = settings.tasks if isinstance(settings, LeadSettings) else ()
        if settings.certificate is None:
            require_loopback(settings.host)
        self._state, self._next = folder / STATE_FILE, folder / NEXT_FILE
        stop = folder / STOP_FILE
        for stale in (stop, self._next):
            stale.unlink(missing_ok=True)
        self.service = Service(
            owner,
            wait_ms=settings.wait_ms,
            timeout_s=settings.timeout_s,
            cache_rows=settings.cache_rows,
            ended=lambda: ended() or stop.exists() or self._next.exists(),
        )
        token_file = Path(settings.token or folder / _TOKEN_FILE)
        token = token_in(token_file)
        app, predict = application(self.service, settings)
        config = uvicorn.Config(
            Guard(app, predict, token, settings, self.service),
            host=settings.host,
            port=settings.port,
            ws="none",
            http=_Protocol,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=1024,
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
            ssl_ca_certs=settings.client_ca,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.client_ca else ssl.CERT_NONE,
        )
        if settings.certificate is not None:
            config.load()
            assert config.ssl is not None, "a certificate was given"
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
        self._server = _Server(config, self.service)
        self._thread = threading.Thread(target=self._serve, name="vfl-http", daemon=True)
        self._thread.start()
        self.port = self._listening(settings)
        scheme = "http" if settings.certificate is None else "https"
        self.address = f"{scheme}://{settings.host}:{self.port}"
        self.welcome = f"listens at {self.address}; clients show the token in {token_file}"
        write_json(self._state, {"address": self.address, "process": os.getpid()})

    def show(
        self,
        version: str,
        parties: list[str],
        data: PartyData,
        classes: Classes | None,
        drift: Drift,
    ) -> None:
        """What the next session serves; see `Model`."""
        self.service.show(Model(version, Rows(data), classes), parties, drift)

    def following(self) -> Path | None:
        """The folder of the run to go on with, told once; None ends the service."""
        if not self._next.exists():
            return None
        named = Path(self._next.read_text(encoding="utf-8").strip())
        self._next.unlink()
        return named

    @property
    def was_ready(self) -> bool:
        """Whether the model that is shown has answered, or could have."""
        return self.service.was_ready

    def play(self, serving: ServingParty) -> None:
        """See `Service.play`."""
        self.service.play(serving)

    def lost(self, error: VFLError) -> bool:
        """See `Service.lost`."""
        return self.service.lost(error)

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        self.service.stop()
        self._server.should_exit = True
        self._thread.join(_START_S)
        self._state.unlink(missing_ok=True)

    def _serve(self) -> None:
        try:
            self._server.run()
        except SystemExit:  # uvicorn's word for a port that is taken
            self._server.should_exit = True

    def _listening(self, settings: ServeSettings) -> int:
        deadline = time.monotonic() + _START_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._server.started:
                return int(self._server.servers[0].sockets[0].getsockname()[1])
            time.sleep(0.01)
        raise UserError(
            "cannot listen for clients",
            where=f"{settings.host}:{settings.port}",
            fix="choose another port (--port, or port in the [serve] of a party's own file), or 0",
        )


def open_front(party: PartyFile, run: str) -> HttpFront:
    """The service of the label party's own run, as its folder's settings say.

    Raises:
        RunFolderError: what `vfl serve` wrote there cannot be read.
        UserError: see `HttpFront`.
    """
    folder = party.run_path(run)
    return HttpFront(party.party, read_settings(folder), folder)


def open_own_front(party: PartyFile, folder: Path, ended: Callable[[], bool]) -> HttpFront:
    """The service of a further label party, as [serve] of its own file says.

    Args:
        party: its file.
        folder: its own part of the run.
        ended: asked now and then whether the session has ended.

    Raises:
        UserError: see `HttpFront`.
    """
    files = ("token", "certificate", "key", "client_ca")
    said = party.serve or ServeSettings()
    named = {each: value for each in files if (value := getattr(said, each)) is not None}
    settings = said.model_copy(
        update={each: str(party.beside(value)) for each, value in named.items()}
    )
    return HttpFront(party.party, settings, folder, ended)


def read_settings(folder: Path) -> LeadSettings:
    """The settings that `settings_file` left; the defaults without any."""
    path = folder / SETTINGS_FILE
    if not path.exists():
        return LeadSettings()
    try:
        return LeadSettings.model_validate(read_json(path))
    except ValueError:
        raise RunFolderError("settings of the service cannot be read", where=str(path)) from None


def switch(folder: Path, to: Path) -> None:
    """Have the service that began with the run in `folder` go on with another.

    Raises:
        UserError: nothing serves from that folder.
    """
    if not (folder / STATE_FILE).exists():
        raise UserError(
            "no service began with this run",
            where=str(folder),
            fix="vfl serve RUN starts one; --switch names the run it began with first",
        )
    write_text(folder / NEXT_FILE, f"{to.resolve()}\n")


def settings_file(folder: Path, settings: ServeSettings) -> None:
    """Leave settings where the process that serves finds them."""
    write_json(folder / SETTINGS_FILE, json.loads(settings.model_dump_json()))
