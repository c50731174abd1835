"""The streams of one account and region: create, find, list and delete them, within the account's quotas."""

import re
from collections.abc import Callable
from typing import Final

from kpl_core.options.kinesis_limits import KIB
from kpl_core.testing.fake_stream import ACTIVE, CREATING, DELETING, PROVISIONED, UPDATING, FakeStream
from kpl_core.testing.kinesis_api import (
    EXPIRED_NEXT_TOKEN,
    INVALID_ARGUMENT,
    LIMIT_EXCEEDED,
    RESOURCE_IN_USE,
    RESOURCE_NOT_FOUND,
    VALIDATION,
    KinesisError,
    ServiceDurations,
    ServiceLimits,
    StreamPage,
    StreamSummary,
    constraint_violated,
)
from kpl_core.testing.shard_listing import LIFETIME_MS, StreamListToken, decode_token, encode_token

# A stream of mode ON_DEMAND starts with this many shards (AWS, "Choose the right mode").
_ON_DEMAND_SHARDS: Final = 4
_STREAM_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class FakeAccount:
    """Streams by name. `stream` is a name or an ARN. `now` is in seconds of a clock that reads 0 at `epoch`."""

    def __init__(self, *, limits: ServiceLimits, durations: ServiceDurations, arn_prefix: str, epoch: float) -> None:
        self.limits = limits
        self.durations = durations
        self.region, self.account_id = arn_prefix.split(":")[3:5]
        self._arn_prefix = arn_prefix
        self.epoch = epoch
        self._streams: dict[str, FakeStream] = {}

    def milliseconds(self, now: float) -> int:
        """Return an instant of the clock as milliseconds since 1970."""
        return int((now + self.epoch) * 1000.0)

    def arn(self, stream_name: str) -> str:
        """Return the ARN of a stream of this account."""
        return f"{self._arn_prefix}{stream_name}"

    def name_of(self, stream: str) -> str:
        """Return the name in an ARN, or the name itself."""
        return stream.partition(":stream/")[2].split("/")[0] if stream.startswith("arn:") else stream

    def stream(self, stream: str, now: float, *, ready: bool = True) -> FakeStream:
        """Return a stream. With `ready`, a stream that is CREATING or DELETING does not count.

        Raises:
            KinesisError: ResourceNotFoundException.
        """
        name = self.name_of(stream)
        found = self.find(name, now)
        foreign = stream.startswith("arn:") and stream != self.arn(name)
        if found is None or foreign or (ready and self.status(found, now) in {CREATING, DELETING}):
            message = f"Stream {name} under account {self.account_id} not found."
            raise KinesisError(RESOURCE_NOT_FOUND, message)
        return found

    def active(self, stream: str, now: float, *, provisioned: bool = False) -> FakeStream:
        """Return a stream that may be changed now.

        Raises:
            KinesisError: ResourceNotFoundException; ResourceInUseException if the stream is not ACTIVE;
                ValidationException if `provisioned` is set and the stream's mode is ON_DEMAND.
        """
        found = self.stream(stream, now, ready=False)
        status = self.status(found, now)
        if status != ACTIVE:
            message = f"Stream {found.name} under account {self.account_id} not ACTIVE, instead in state {status}"
            raise KinesisError(RESOURCE_IN_USE, message)
        if provisioned and found.mode != PROVISIONED:
            message = f"Request is invalid. Stream {found.name} under account {self.account_id} is in On-Demand mode."
            raise KinesisError(VALIDATION, message)
        return found

    def status(self, stream: FakeStream, now: float) -> str:
        """Return a stream's status at `now`."""
        return stream.status(now, self.milliseconds(now))

    def change(self, stream: FakeStream, change: Callable[[int], object], now: float) -> None:
        """Apply a change, which is called with the time in ms, once the stream was UPDATING long enough."""
        if self.durations.updating_seconds > 0.0:
            stream.begin(UPDATING, until=now + self.durations.updating_seconds, change=change)
        else:
            change(self.milliseconds(now))

    def create(
        self, stream_name: str, *, shard_count: int | None, mode: str, max_record_size_kib: int | None, now: float
    ) -> None:
        """Create a stream.

        Raises:
            KinesisError: the name is taken or not valid; the shard count is below 1, does not fit the mode or
                exceeds the account's quota.
        """
        if _STREAM_NAME.fullmatch(stream_name) is None:
            pattern = "Member must satisfy regular expression pattern: [a-zA-Z0-9_.-]+"
            raise constraint_violated(path="streamName", constraint=pattern, value=stream_name)
        if (mode == PROVISIONED) != (shard_count is not None):
            must = "must be" if mode == PROVISIONED else "cannot be"
            raise KinesisError(VALIDATION, f"ShardCount {must} provided for the {mode} stream mode.")
        if self.find(stream_name, now) is not None:
            message = f"Stream {stream_name} under account {self.account_id} already exists."
            raise KinesisError(RESOURCE_IN_USE, message)
        count = _ON_DEMAND_SHARDS if shard_count is None else shard_count
        if count < 1:
            least = "Member must have value greater than or equal to 1"
            raise constraint_violated(path="shardCount", constraint=least, value=str(count))
        self.check_room(count, now)
        stream = FakeStream(
            stream_name,
            arn=self.arn(stream_name),
            account_id=self.account_id,
            mode=mode,
            shard_count=count,
            now_ms=self.milliseconds(now),
            limits=self.limits,
        )
        if max_record_size_kib is not None:
            stream.max_record_bytes = max_record_size_kib * KIB
        if self.durations.creating_seconds > 0.0:
            stream.begin(CREATING, until=now + self.durations.creating_seconds)
        self._streams[stream_name] = stream

    def delete(self, stream: str, now: float) -> None:
        """Delete a stream and its records.

        Raises:
            KinesisError: ResourceNotFoundException.
        """
        doomed = self.stream(stream, now, ready=False)
        doomed.begin(DELETING, until=now + self.durations.deleting_seconds)

    def summary(self, stream: FakeStream, now: float) -> StreamSummary:
        """Describe a stream without its shards. A stream that is CREATING has no open shards."""
        status = self.status(stream, now)
        return StreamSummary(
            stream_name=stream.name,
            stream_arn=stream.arn,
            stream_status=status,
            stream_mode=stream.mode,
            created_ms=stream.created_ms,
            retention_hours=int(self.limits.retention_seconds // 3600),
            open_shard_count=0 if status == CREATING else len(stream.shards.open),
            max_record_size_kib=stream.max_record_bytes // KIB,
        )

    def page(self, *, limit: int, after: str, next_token: str | None, now: float) -> StreamPage:
        """List streams by name, beginning after the stream `after` or where the token continues.

        Raises:
            KinesisError: the token did not come from this service, or it expired.
        """
        if next_token is not None:
            token = decode_token(next_token, StreamListToken)
            if token is None:
                raise KinesisError(INVALID_ARGUMENT, "NextToken is invalid.")
            self.check_token_age(token.issued_ms, now)
            after = token.after_stream_name
        found = [stream for name in sorted(self._streams) if (stream := self.find(name, now)) and name > after]
        page = tuple(self.summary(stream, now) for stream in found[:limit])
        more = len(found) > limit
        following = encode_token(StreamListToken(page[-1].stream_name, self.milliseconds(now))) if more else None
        return StreamPage(page, following)

    def check_token_age(self, issued_ms: int, now: float) -> None:
        """Reject a NextToken that is older than 300 seconds.

        Raises:
            KinesisError: ExpiredNextTokenException.
        """
        age_ms = self.milliseconds(now) - issued_ms
        if age_ms >= LIFETIME_MS:
            message = f"NextToken expired: it was issued {age_ms} milliseconds ago and lives for {LIFETIME_MS}."
            raise KinesisError(EXPIRED_NEXT_TOKEN, message)

    def open_shard_count(self, now: float) -> int:
        """Return how many shards are open in the account."""
        for name in list(self._streams):
            # Removes a stream whose deletion is complete, even if no request named it since.
            self.find(name, now)
        return sum(len(stream.shards.open) for stream in self._streams.values())

    def room(self, now: float) -> int:
        """Return how many shards the account may still open."""
        return self.limits.shards_per_account - self.open_shard_count(now)

    def check_room(self, additional: int, now: float) -> None:
        """Reject a request that needs more shards than the account may have.

        Raises:
            KinesisError: LimitExceededException.
        """
        if additional > self.room(now):
            message = (
                f"This request would exceed the shard limit for the account {self.account_id} in {self.region}. "
                f"Current shard count for the account: {self.open_shard_count(now)}. "
                f"Limit: {self.limits.shards_per_account}. "
                f"Number of additional shards that would have resulted from this request: {additional}."
            )
            raise KinesisError(LIMIT_EXCEEDED, message)

    def streams(self) -> list[FakeStream]:
        """Return all streams, by name."""
        return [self._streams[name] for name in sorted(self._streams)]

    def find(self, stream_name: str, now: float) -> FakeStream | None:
        """Return a stream by its name, in any state. Return None if it does not exist or its deletion is complete."""
        found = self._streams.get(stream_name)
        if found is not None and found.gone(now):
            del self._streams[stream_name]
            return None
        return found
