"""The viewer's server: loopback only, GET only, one run folder or a folder of runs, no state.

Model text leaves it as data, never as markup.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from counterpoise.errors import nearest
from counterpoise.report.html import asset as asset_text
from counterpoise.run.find import runs_below
from counterpoise.run.read import open_run
from counterpoise.viewer import api
from counterpoise.viewer.cache import BatchCache
from counterpoise.viewer.tokens import BatchTokens
from counterpoise.viewer.turns import prompt_turns

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
            "turns",
            "inspector",
            "prompts",
            "history",
            "address",
            "theme",
            "runs",
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
PROMPT = "{batch:int}/prompts/{group:int}"


def app(path: Path, port: int) -> ASGIApp:
    """The application for one run folder, or for a folder of runs, on one port."""
    runs = runs_below(path)
    routes = run_routes(lambda request: path, "")
    if runs:
        routes = [
            Route("/", lambda request: _page("runs.html")),
            Route("/api/runs", lambda request: _json(_lines(path))),
            Route("/assets/{name}", _asset),
            *run_routes(lambda request: _chosen(path, request.path_params["run"]), "/runs/{run}"),
        ]
    inner = Starlette(routes=routes, exception_handlers={ValueError: _not_there})
    return guard(inner, port)


def run_routes(folder: Callable[[Request], Path], prefix: str) -> list[Route]:
    """What is served of a run; ``folder`` says which one a request is about."""
    cache = BatchCache()

    def routes_of(kind: str, source: str) -> list[Route]:
        def tokens(request: Request) -> BatchTokens:
            return cache.get(folder(request), request.path_params["batch"], source)

        def batch(request: Request) -> Response:
            return _json(api.batch_info(tokens(request)))

        def column(request: Request) -> Response:
            given = request.path_params
            kind, content = api.pack_column(tokens(request), given["group"], given["name"])
            headers = {"X-Dtype": kind}
            return Response(content, media_type="application/octet-stream", headers=headers)

        def token(request: Request) -> Response:
            given = request.path_params
            return _json(api.token(tokens(request), given["group"], given["at"]))

        def turns(request: Request) -> Response:
            return _json(prompt_turns(tokens(request), request.path_params["group"]))

        return [
            Route(f"{prefix}/api/{kind}/{{batch:int}}", batch),
            Route(f"{prefix}/api/{kind}/{PROMPT}/turns", turns),
            Route(f"{prefix}/api/{kind}/{PROMPT}/columns/{{name:path}}", column),
            Route(f"{prefix}/api/{kind}/{PROMPT}/tokens/{{at:int}}", token),
        ]

    def history(request: Request) -> Response:
        run = open_run(folder(request))
        return _json(api.prompt_history(run, request.query_params.get("prompt_id", "")))

    return [
        Route(f"{prefix}/", lambda request: _page("viewer.html")),
        Route(f"{prefix}/assets/{{name}}", _asset),
        Route(f"{prefix}/api/run", lambda request: _json(api.run_info(open_run(folder(request))))),
        Route(f"{prefix}/api/history", history),
        *routes_of("batches", ""),
        *routes_of("evals", "evals"),
    ]


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
    """Serve a run folder, or a folder of runs, until interrupted; ``ready`` gets the address."""
    import uvicorn

    from counterpoise.viewer.connection import server_config

    if not runs_below(path):
        open_run(path)
    bound = free_socket(port)
    port = bound.getsockname()[1]
    ready(f"http://{HOST}:{port}/")
    uvicorn.Server(server_config(app(path, port))).run(sockets=[bound])


def _page(name: str) -> Response:
    return Response(asset_text(name, "viewer"), media_type="text/html")


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        return PlainTextResponse("no such file", 404)
    subject = "report" if name == "tokens.css" else "viewer"
    return Response(asset_text(name, subject), media_type=ASSETS[name])


def _chosen(path: Path, name: str) -> Path:
    runs = runs_below(path)
    if name not in runs:
        raise ValueError(f"no run {name!r} in {path.name!r}. {nearest(name, runs)}")
    return runs[name]


def _lines(path: Path) -> list[dict[str, object]]:
    runs = runs_below(path).items()
    return [{**api.run_line(open_run(run)), "name": name} for name, run in runs]


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
