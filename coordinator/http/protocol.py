"""Protocol: one connection. Bounds what it may send before a request has begun, and how long it may leave unread."""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10  # of the URL and the headers
MOST_CONNECTIONS = 1024
_HEAD_S = 60.0  # until the head of a request is whole
_UNREAD_S = 30.0  # in which a client has to read all that was sent, or at least this much of it:
_LEAST_READ = 48 << 10


class TooLarge(Exception):
    """The head of a request has more bytes than one may have. Ends the parsing."""


class BoundedProtocol(HttpToolsProtocol):
    """Cuts off clients that do not read: closed, a connection would wait for ever to get rid of what was sent."""

    _num_head = 0  # bytes of the URL and the headers of a request, as far as they are whole
    _num_pending = 0  # bytes since the parser has told of anything: it gathers them
    _deadline: asyncio.TimerHandle | None = None
    _num_unread = 0  # bytes that the client has not taken, when `_reading` began
    _reading: asyncio.TimerHandle | None = None  # runs while there are such

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # writing pauses while anything is unread
        if len(self.connections) > MOST_CONNECTIONS:
            self._end(HTTPStatus.SERVICE_UNAVAILABLE, b"retry-after: 5\r\n")
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_reading()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_read()

    def resume_writing(self) -> None:
        self._stop_reading()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._is_answering:
            self._start_deadline()
        self._num_pending += len(data)
        super().data_received(data)
        if self._num_pending > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        if self._num_head > MOST_HEAD_BYTES:
            self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head = 0
        self._start_deadline()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        self._stop_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._num_pending = 0
        self._num_head += num_bytes
        if self._num_head > MOST_HEAD_BYTES:
            raise TooLarge

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(_HEAD_S, self._end, HTTPStatus.REQUEST_TIMEOUT)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_read(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(_UNREAD_S, self._require_read)

    def _require_read(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() < _LEAST_READ:
            self.transport.abort()
        else:
            self._wait_read()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _end(self, status: HTTPStatus, headers: bytes = b"") -> None:
        """Say why, unless that would stand in the middle of an answer, and close."""
        self._stop_deadline()
        if self._is_answering:
            self.transport.abort()
            return
        head = f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n".encode()
        self.transport.write(head + headers + b"\r\n")
        self.transport.close()
