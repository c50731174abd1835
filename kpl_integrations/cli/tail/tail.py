"""`kpl tail`: the user records of a stream, as they arrive."""

import sys
from collections.abc import Sequence

from rich.console import Console

from kpl_integrations.cli.connection import Connection
from kpl_integrations.cli.exit_code import ExitCode
from kpl_integrations.cli.signals import until_signal
from kpl_integrations.cli.tail.consumer_view import ReadRecord
from kpl_integrations.cli.tail.record_text import as_json, as_text
from kpl_integrations.cli.tail.stream_reader import StreamReader
from kpl_integrations.cli.terminal import note, results

__all__ = ["Tail"]


class Tail:
    """One run of the command."""

    def __init__(
        self,
        stream: str,
        *,
        endpoint_url: str | None,
        region: str | None,
        from_start: bool,
        follow: bool,
        limit: int | None,
        as_json: bool,
    ) -> None:
        self._stream = stream
        self._endpoint_url = endpoint_url
        self._region = region
        self._from_start = from_start
        self._follow = follow
        self._left = limit
        self._console: Console | None = None if as_json else results()

    async def run(self) -> ExitCode:
        """Read until Ctrl-C, the limit, or the end if nothing is to be followed; each of them is status 0."""
        await until_signal(self._read)
        return ExitCode.DONE

    async def _read(self) -> ExitCode:
        connection = await Connection.resolved(self._stream, region=self._region, endpoint_url=self._endpoint_url)
        await connection.require_stream()
        async with connection.client() as client:
            reader = StreamReader(
                client,
                connection.stream_argument,
                self._take,
                start="TRIM_HORIZON" if self._from_start else "LATEST",
                follow=self._follow,
            )
            try:
                await reader.run(started=lambda: self._tell_waiting(connection))
            finally:
                if reader.dropped_records:
                    note(
                        f"{reader.dropped_records:,} aggregated records were on the wrong shard and dropped, "
                        "as the Kinesis Client Library drops them"
                    )
        return ExitCode.DONE

    def _tell_waiting(self, connection: Connection) -> None:
        """Say to a person that silence means there is nothing yet; a program may wait for this line too."""
        if self._follow:
            note(f"reading {self._stream} from {connection.place}; Ctrl-C ends it")

    def _take(self, records: Sequence[ReadRecord]) -> bool:
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        if self._console is None:
            sys.stdout.write("".join(f"{as_json(record)}\n" for record in records))
        else:
            for record in records:
                self._console.print(as_text(record), soft_wrap=True)
        sys.stdout.flush()
        return self._left is None or self._left > 0
