"""A short cut in uvicorn's HTTP protocol, for requests that need no waiting (see `at_once.py`).

A POST that comes whole in one piece is held until its end and offered to `asked_first`. What is declined, or not
whole with its first piece, goes on to the application as if it had never been held. What uvicorn makes for each
request (a scope, a cycle, a task, a timer) is made only then.

And most requests of a connection are like the one before: those are not even parsed (see `repeated_head.py`).
"""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kpl_integrations.ingest.fast_path.at_once import AnswersAtOnce, AtOnceAnswer, written
from kpl_integrations.ingest.fast_path.repeated_head import RepeatedHead
from kpl_integrations.ingest.http.bounded_protocol import BoundedProtocol
from kpl_integrations.ingest.routes.records_head import RecordsHead

__all__ = ["AtOnceProtocol"]

# As uvicorn answers where an application fails.
_FAILED: Final = written(
    500,
    [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"), (b"connection", b"close")],
    b"Internal Server Error",
)
_INVALID: Final = "Invalid HTTP request received."


class AtOnceProtocol(BoundedProtocol):
    """One connection; a subclass says who is asked first."""

    asked_first: ClassVar[AnswersAtOnce | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        # The pieces of a body whose request nobody has heard of yet.
        self._held: list[bytes] | None = None
        # The head of the last request and what it asks for, if that was answered at once and nothing came since.
        self._repeated: tuple[RepeatedHead, RecordsHead] | None = None
        # What is being parsed.
        self._received = b""
        # When a request was last answered at once, and the one timer that looks at it.
        self._answered_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @classmethod
    def asking(cls, asked_first: AnswersAtOnce) -> "type[AtOnceProtocol]":
        """Return the class whose requests are offered to `asked_first`."""
        return type(cls.__name__, (cls,), {"asked_first": asked_first})

    def connection_lost(self, exc: Exception | None) -> None:
        """Look no more whether it is idle."""
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None:
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer a request like the one before; else feed the parser, and let go what is not whole."""
        if self._repeated is not None:
            if self._answer_alike(*self._repeated, data):
                return
            self._repeated = None
        self._received = data
        super().data_received(data)
        self._received = b""
        if self._held is None:
            return
        try:
            self._let_go()
        except Exception:  # noqa: BLE001 - as the parser does with whatever its callbacks raise
            # As uvicorn does where the parser calls it.
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)

    def _answer_alike(self, repeated: RepeatedHead, head: RecordsHead, data: bytes) -> bool:
        """Answer a request whose head is the last one's; False: it is another, or may have to wait."""
        if self.transport.is_closing() or not self._has_room():
            return False
        body = repeated.body_of(data)
        answer = None if body is None else self._answer_to(head, body)
        if answer is None:
            return False
        self._write(answer)
        return True

    def on_message_begin(self) -> None:
        """Begin a request; its scope is made when the application needs it."""
        if self.asked_first is None:
            super().on_message_begin()
            return
        self._begin_head()
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_headers_complete(self) -> None:
        """Hold a request, or let the application have it."""
        if self.transport.is_closing():
            # Its client could not be told what became of it, and sends it again.
            return
        if self.asked_first is None or self.parser.should_upgrade():
            super().on_headers_complete()
        elif self._may_be_held():
            self._end_head()
            self._held = []
        else:
            self._call_application()

    def _may_be_held(self) -> bool:
        """Say whether nothing but its target, header fields and body decide what becomes of a request."""
        parser = self.parser
        cycle: Any = self.cycle
        return (
            parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and parser.get_http_version() == "1.1"
            and not self.expect_100_continue
            # Nobody is before it.
            and (cycle is None or cycle.response_complete)
            and not self.pipeline
            and self._has_room()
        )

    def _has_room(self) -> bool:
        """Say whether the server may take one more request; who does not read his answers waits for room as ever."""
        limit = self.limit_concurrency
        return not self.flow.write_paused and (
            limit is None or (len(self.connections) < limit and len(self.tasks) < limit)
        )

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._body_within = True
        if self._held is not None:
            self._held.append(body)
        elif not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; answer it if that needs no waiting."""
        is_first_and_whole = self._begins_within and not self._ends_within
        self._ends_within = True
        held = self._held
        if held is None:
            if not self.transport.is_closing():
                super().on_message_complete()
            return
        assert self.asked_first is not None  # noqa: S101 - else nothing is held
        body = held[0] if len(held) == 1 else b"".join(held)
        head = self.asked_first.head_at_once(self.url, self.headers)
        answer = None if head is None else self._answer_to(head, body)
        if head is None or answer is None:
            self._let_go()
            super().on_message_complete()
            return
        self._held = None
        if is_first_and_whole and (repeated := RepeatedHead.of(self._received, len(body))) is not None:
            self._repeated = repeated, head
        self._write(answer)

    def _answer_to(self, head: RecordsHead, body: bytes) -> AtOnceAnswer | None:
        assert self.asked_first is not None  # noqa: S101 - else nobody is asked
        try:
            return self.asked_first.answer_at_once(head, body)
        except Exception:
            self.logger.exception("Exception while answering at once")
            return _FAILED

    def _write(self, answer: AtOnceAnswer) -> None:
        parts = [STATUS_LINE[answer.status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(answer.content)
        self.transport.write(b"".join(parts))
        self.server_state.total_requests += 1
        if answer.closes:
            self.transport.close()
            return
        self._answered_at = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_if_idle)

    def _look_if_idle(self) -> None:
        """Close a connection that has been quiet for long; one timer instead of one for each request."""
        self._idle_timer = None
        cycle: Any = self.cycle
        if self.transport.is_closing() or self._in_head or not (cycle is None or cycle.response_complete):
            # Something is under way: its own timer watches it, and the next answer sets this one again.
            return
        if self.timeout_keep_alive_task is not None:
            # uvicorn's own counts from a later answer.
            return
        rest = self._answered_at + self.timeout_keep_alive - self.loop.time()
        if rest > 0.0:
            self._idle_timer = self.loop.call_later(rest, self._look_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def _let_go(self) -> None:
        """Let a held request go on to the application, as far as it has come."""
        held, self._held = self._held or [], None
        if self.transport.is_closing():
            # It broke off: its rest was no HTTP.
            return
        self._call_application()
        for piece in held:
            super().on_body(piece)

    def _call_application(self) -> None:
        """Do what was left undone when the request began, and all that follows from its head."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()
