"""What can go wrong with a request or a record: pure descriptions, carried out by who serves it.

`FakeKinesis` itself carries out `RecordError`, `SplitDuringRequest` and `MergeDuringRequest`; the
rest is for its face: `LocalKinesis` over HTTP, `FakeTransport` in memory.
"""

from dataclasses import dataclass

from kpl_core.testing.kinesis_error import KinesisError

__all__ = [
    "BadBody",
    "Effect",
    "ErrorAnswer",
    "Hang",
    "Latency",
    "MergeDuringRequest",
    "RecordError",
    "RequestPlan",
    "ResetAfterCommit",
    "ResetBeforeCommit",
    "SplitDuringRequest",
    "WrongCount",
]


@dataclass(frozen=True, slots=True)
class Latency:
    """Wait `seconds` before the request takes effect, or, with `after_commit`, before its answer."""

    seconds: float
    after_commit: bool = False


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Refuse the whole request; message and status default to the service's for that code."""

    code: str
    message: str | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class RecordError:
    """Refuse one record inside an answer of status 200, as the service does when it throttles a shard."""

    code: str = "ProvisionedThroughputExceededException"
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Accept the request and never answer; nothing is stored."""


@dataclass(frozen=True, slots=True)
class ResetBeforeCommit:
    """Reset the connection; nothing was stored."""


@dataclass(frozen=True, slots=True)
class ResetAfterCommit:
    """Store everything, then reset the connection instead of answering."""


@dataclass(frozen=True, slots=True)
class WrongCount:
    """Answer `by` results more (or, negative, fewer) than there were records."""

    by: int = -1


@dataclass(frozen=True, slots=True)
class BadBody:
    """Answer 200 with this body instead of the real one."""

    body: bytes = b'{"FailedRecordCount":0,"Records":['


@dataclass(frozen=True, slots=True)
class SplitDuringRequest:
    """Split a shard in the middle before the request is routed; by default the widest open one."""

    shard_id: str | None = None


@dataclass(frozen=True, slots=True)
class MergeDuringRequest:
    """Merge a shard with its right neighbour before the request is routed; by default the first two."""

    shard_id: str | None = None


Effect = (
    Latency
    | ErrorAnswer
    | RecordError
    | Hang
    | ResetBeforeCommit
    | ResetAfterCommit
    | WrongCount
    | BadBody
    | SplitDuringRequest
    | MergeDuringRequest
)


@dataclass(slots=True)
class RequestPlan:
    """All that shall happen to one request, in the order it is to be carried out.

    1. wait `latency_seconds`; 2. `hang`: never answer; 3. `reset_before`: reset the connection;
    4. `error`: answer it; 5. `reshards`: pass them to `FakeKinesis.reshard`; 6. commit; 7. wait
    `answer_latency_seconds`; 8. `reset_after`; 9. change the number of results by `count_change`;
    10. answer `body` instead.
    """

    latency_seconds: float = 0.0
    hang: bool = False
    reset_before: bool = False
    error: KinesisError | None = None
    reshards: tuple[SplitDuringRequest | MergeDuringRequest, ...] = ()
    answer_latency_seconds: float = 0.0
    reset_after: bool = False
    count_change: int = 0
    body: bytes | None = None

    def include(self, effect: Effect) -> None:
        """Add one effect; the first error and the last body win, latencies add up."""
        match effect:
            case Latency(seconds, after_commit=True):
                self.answer_latency_seconds += seconds
            case Latency(seconds):
                self.latency_seconds += seconds
            case ErrorAnswer(code, message, status):
                self.error = self.error or KinesisError(code, message, status=status)
            case WrongCount(by):
                self.count_change += by
            case BadBody(body):
                self.body = body
            case SplitDuringRequest() | MergeDuringRequest():
                self.reshards = (*self.reshards, effect)
            case _:
                self.hang |= isinstance(effect, Hang)
                self.reset_before |= isinstance(effect, ResetBeforeCommit)
                self.reset_after |= isinstance(effect, ResetAfterCommit)
