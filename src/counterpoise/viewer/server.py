"""The viewer's server: loopback only, GET only, one run folder, no state.

Model text leaves it as data, never as markup.
"""

from __future__ import annotations

import json
import socket
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from counterpoise.report.html import asset as asset_text
from counterpoise.run.read import batch_files, open_run
from counterpoise.viewer import api
from counterpoise.viewer.tokens import BatchTokens, open_batch

HOST = "127.0.0.1"
ASSETS = {
    "viewer.css": "text/css",
    "tokens.css": "text/css",
    **{
        f"{name}.js": "text/javascript"
        for name in (
            "viewer",
            "source",
            "text",
            "colour",
            "layout",
            "align",
            "pane",
            "inspector",
            "prompts",
        )
    },
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri"
        " 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
CACHED_BATCHES = 3


def app(path: Path, port: int) -> ASGIApp:
    """The application for one run folder, on one port."""
    cache: OrderedDict[tuple[int, float], BatchTokens] = OrderedDict()

    def tokens(request: Request) -> BatchTokens:
        return _open(path, request.path_params["batch"], cache)

    def index(request: Request) -> Response:
        return Response(asset_text("viewer.html", "viewer"), media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("no such file", 404)
        return Response(
            asset_text(name, "report" if name == "tokens.css" else "viewer"),
            media_type=ASSETS[name],
        )

    def run(request: Request) -> Response:
        return _json(api.run_info(open_run(path)))

    def batch(request: Request) -> Response:
        return _json(api.batch_info(tokens(request)))

    def column(request: Request) -> Response:
        kind, content = api.pack_column(
            tokens(request), request.path_params["group"], request.path_params["name"]
        )
        return Response(content, media_type="application/octet-stream", headers={"X-Dtype": kind})

    def token(request: Request) -> Response:
        return _json(
            api.token(tokens(request), request.path_params["group"], request.path_params["at"])
        )

    prompt = "/api/batches/{batch:int}/prompts/{group:int}"
    routes = [
        Route("/", index),
        Route("/assets/{name}", asset),
        Route("/api/run", run),
        Route("/api/batches/{batch:int}", batch),
        Route(f"{prompt}/columns/{{name:path}}", column),
        Route(f"{prompt}/tokens/{{at:int}}", token),
    ]
    inner = Starlette(routes=routes, exception_handlers={ValueError: _not_there})
    return guard(inner, port)


def guard(inner: ASGIApp, port: int) -> ASGIApp:
    """Answer only GET and HEAD, only to a browser that was told this very address (a page elsewhere
    cannot point its name at us).
    """
    hosts = {f"{name}:{port}".encode() for name in (HOST, "localhost")}

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await inner(scope, receive, send)
            return
        given = [value for key, value in scope["headers"] if key == b"host"]
        if len(given) != 1 or given[0] not in hosts:
            await PlainTextResponse("wrong host", 421, headers=HEADERS)(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            await PlainTextResponse("GET only", 405, headers=HEADERS)(scope, receive, send)
        else:
            await inner(scope, receive, _with_headers(send))

    return outer


def free_socket(port: int = 0) -> socket.socket:
    """A socket bound to loopback; port 0 takes a free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen(128)  # a browser that comes early waits instead of being turned away
    except OSError as error:
        bound.close()
        raise ValueError(
            f"view: port {port} cannot be used ({error.strerror}). Leave --port out to take a free"
            " one."
        ) from None
    return bound


def serve(path: Path, port: int = 0, *, ready: Callable[[str], None] = print) -> None:
    """Serve a run folder until interrupted; ``ready`` gets the address."""
    import uvicorn

    open_run(path)
    bound = free_socket(port)
    port = bound.getsockname()[1]
    config = uvicorn.Config(
        app(path, port), log_level="warning", access_log=False, server_header=False
    )
    ready(f"http://{HOST}:{port}/")
    uvicorn.Server(config).run(sockets=[bound])


def _open(
    path: Path, batch: int, cache: OrderedDict[tuple[int, float], BatchTokens]
) -> BatchTokens:
    """The tokens of a batch, kept while its files do not change."""
    files = [
        file for folder in ("tokens", "rollouts") if (file := batch_files(path, folder).get(batch))
    ]
    key = (batch, max((file.stat().st_mtime for file in files), default=0.0))
    if key not in cache:
        cache[key] = open_batch(open_run(path), batch)
        while len(cache) > CACHED_BATCHES:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _with_headers(send: Send) -> Send:
    async def send_all(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return send_all


async def _not_there(request: Request, error: Exception) -> Response:
    return _json({"error": str(error)}, 404)


def _json(value: object, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")
