"""Connections that end: a request and its answer have so many seconds, then the line is cut.

A browser that vanished, a client that says half a request, one that does not read its answer: none
of them holds a connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

EXCHANGE_S = 60.0


def server_config(app: ASGIApp, exchange_s: float = EXCHANGE_S) -> uvicorn.Config:
    """How the viewer is served: quiet, and every exchange with its time limit."""
    limited = type("Limited", (LimitedProtocol,), {"exchange_s": exchange_s})
    return uvicorn.Config(
        app,
        http=limited,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )


class LimitedProtocol(H11Protocol):
    """HTTP whose exchanges end in time; between them uvicorn's keep-alive limit holds."""

    exchange_s = EXCHANGE_S
    limit: asyncio.TimerHandle | None = None
    is_answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        if self.is_answered and self._is_read():
            self._end()
        self._begin()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.is_answered = True
        if self._is_read():
            self._end()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _is_read(self) -> bool:
        """Whether the client has taken what was written to it."""
        return cast(asyncio.Transport, self.transport).get_write_buffer_size() == 0

    def _begin(self) -> None:
        self.limit = self.limit or self.loop.call_later(self.exchange_s, self._cut)

    def _end(self) -> None:
        if self.limit:
            self.limit.cancel()
        self.limit, self.is_answered = None, False

    def _cut(self) -> None:
        cast(asyncio.Transport, self.transport).abort()
