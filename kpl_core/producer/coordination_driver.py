"""Between the streams and the worker that shares their limits with other processes.

A resource is `stream/shard`; what leaves without a predicted shard counts as a shard of its own,
`stream/`, with one shard's limits.
"""

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kpl_core.coordination.demand import Usage
from kpl_core.coordination.store import CoordinationStore
from kpl_core.coordination.store_objects import Pair
from kpl_core.coordination.stores import open_store
from kpl_core.coordination.worker import CoordinationWorker
from kpl_core.options.config import Config
from kpl_core.options.coordination_options import CoordinationOptions
from kpl_core.producer.stream_set import StreamSet

if TYPE_CHECKING:
    from aiobotocore.session import AioSession


class CoordinationDriver:
    """Opens the store on entering, and closes it on leaving; `finish` gives the shares back.

    Args:
        config: with `coordination` set.
        store: the caller's own, else the one that the options name.
        session: for a store on AWS.
    """

    def __init__(self, config: Config, *, store: CoordinationStore | None, session: "AioSession | None") -> None:
        assert config.coordination is not None  # noqa: S101 - made only then
        self._config = config
        # Kinesis throttles what is above a shard's limit, so no rate is divided before a store has answered.
        self._options: CoordinationOptions = msgspec.structs.replace(config.coordination, usual_workers=None)
        self._store = store
        self._session = session
        self._exits = AsyncExitStack()
        self._streams: StreamSet
        self._worker: CoordinationWorker | None = None

    async def __aenter__(self) -> Self:
        """Open the store, if it is not the caller's own."""
        if self._store is None:
            self._store = await open_store(
                self._options.store, session=self._session, client_options=_client_options(self._config)
            )
            self._exits.push_async_callback(self._store.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the store."""
        await self._exits.aclose()

    def start(self, streams: StreamSet, *, chance: Callable[[], float]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return the task that keeps the streams within their shares."""
        assert self._store is not None  # noqa: S101 - opened on entering
        self._streams = streams
        self._worker = CoordinationWorker(
            self._store,
            self._options,
            usages=self.usages,
            apply_shares=self.apply_shares,
            tell=streams.tell,
            clock=streams.clock,
            chance=chance,
        )
        streams.on_waiting = self._worker.units_wait
        return self._worker.run

    async def finish(self) -> None:
        """Give the shares back, if the store takes note of it within a second."""
        if self._worker is not None:
            await self._worker.leave()

    def lease_age(self) -> float:
        """Return the seconds since the summary in use was computed."""
        return 0.0 if self._worker is None else self._worker.lease_age()

    def shares(self) -> dict[str, float]:
        """Return this producer's part, 0 to 1, of each shard's limits."""
        return {} if self._worker is None else self._worker.fractions()

    def usages(self) -> Mapping[str, Usage]:
        """Return the counts of each shard."""
        usages: dict[str, Usage] = {}
        for stream, pipeline in self._streams.pipelines().items():
            config = self._config.for_stream(stream)
            limit = (config.rate_limit_records_per_sec_per_shard, config.rate_limit_bytes_per_sec_per_shard)
            for shard_id, usage in pipeline.limiter.usages().items():
                usages[f"{stream}/{shard_id or ''}"] = Usage(limit, *usage)
        return usages

    def apply_shares(self, shares: Mapping[str, Pair]) -> None:
        """Let the shards use what they have been given."""
        by_stream: dict[str, dict[str | None, Pair]] = {}
        for resource, share in shares.items():
            # An ARN of a stream holds a / itself.
            stream, _, shard_id = resource.rpartition("/")
            by_stream.setdefault(stream, {})[shard_id or None] = share
        now = self._streams.clock()
        for stream, pipeline in self._streams.pipelines().items():
            if stream in by_stream:
                pipeline.limiter.set_shares(by_stream[stream], now)
                self._streams.wake(stream)


def _client_options(config: Config) -> dict[str, Any]:
    """Return the region and credentials of the producer, for a store on AWS; not its endpoint, which is Kinesis'."""
    options = {
        "region_name": config.region,
        "aws_access_key_id": config.aws_access_key_id,
        "aws_secret_access_key": config.aws_secret_access_key,
        "aws_session_token": config.aws_session_token,
    }
    return {name: value for name, value in options.items() if value is not None}
