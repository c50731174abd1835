"""The plan of the measurement: rows, each a producer in one configuration with a workload.

With these record counts each trial takes some tenths of a CPU-second: long enough for stable results,
short enough for five interleaved rounds of all rows.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.compiled import COMPILED, DIRECTORY
from benchmarks.native_rivals import EXPERT, GO, KPL, Rival
from benchmarks.peers import PEERS, Peer, python_of
from benchmarks.sink_process import REPOSITORY
from benchmarks.workload import Keys, Workload

__all__ = ["OURS", "Kind", "Row", "full_plan", "short_plan"]

Kind = Literal["peers", "over_tls", "workloads", "hot_path", "latency", "memory"]

OURS = "kpl_core"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: measured once a round, in its own process.

    Attributes:
        kind: Its table.
        subject: The producer.
        workload: The records.
        program: Module run as `python -m`.
        python: The interpreter that runs it.
        directory: The working directory; its packages are imported first.
        options: The program's options.
        setting: Describes the difference from the default configuration.
        environment: The environment to install or build first, empty for our sources.
        note: A remark for the reader.
    """

    kind: Kind
    subject: str
    workload: Workload
    program: str
    python: Path = field(default=Path(sys.executable))
    directory: Path = REPOSITORY
    options: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    environment: str = ""
    note: str = ""

    @property
    def key(self) -> str:
        """Return a unique key of this row."""
        return f"{self.kind}: {self.name}"

    @property
    def is_over_tls(self) -> bool:
        """Return True if the producer uses the sink's TLS port."""
        return self.kind == "over_tls"

    @property
    def name(self) -> str:
        """Return the row in one line."""
        return ", ".join(filter(None, (self.subject, self.setting, self.workload.title())))


def short_plan() -> list[Row]:
    """Return the rows that fit into ten minutes: all alternatives, and the rows with a target."""
    rows = []
    for workload in (_work(100), _work(1024)):
        rows += _beside_the_peers(workload, [peer for peer in PEERS if "README" not in peer.name])
    for workload in (_work(100, scale=2), _work(1024, scale=2)):
        rows += _over_tls(workload)
    unique = _work(100, "unique", scale=2)
    rows += [_compiled_over_tls(unique, api) for api in ("put_many", "put_nowait", "put")]
    rows += [_of_rival(rival, unique) for rival in (GO, EXPERT)]
    rows += [
        _ours(_work(100, keys="unique")),
        _ours(_work(100, shard_count=64)),
        _ours(_work(100, shard_count=1_000)),
        _ours(_work(100, scale=0.4), "aggregation off", config={"aggregation_enabled": False}),
        _ours(_work(100), "await put() from 1,000 tasks", api="put_in_tasks"),
        _compiled(_work(100)),
        _compiled(_work(1024)),
        _hot_path(_work(100)),
        *_latency(Workload(100, shard_count=64, record_count=3_000)),
        _memory(_work(100)),
    ]
    return rows


def full_plan() -> list[Row]:
    """Return all rows, with trials four times as long: all peers at every workload, all configurations."""
    rows: list[Row] = []
    for size in (100, 1024):
        for keys in ("10k", "unique"):
            rows += _beside_the_peers(_work(size, keys, scale=4), PEERS, scale=4)
            rows += _over_tls(_work(size, keys, scale=4))
            rows += [_ours(_work(size, keys, shard_count, scale=4)) for shard_count in (1, 64, 1_000)]
            rows += [_hot_path(_work(size, keys, shard_count, scale=4)) for shard_count in (1, 16, 1_000)]
        off = {"aggregation_enabled": False}
        rows += [
            _ours(_work(size, scale=2), "aggregation off", config=off),
            _ours(_work(size, "unique", scale=2), "aggregation off", config=off),
            _ours(_work(size, scale=4), "await put()", api="put"),
            _ours(_work(size, scale=4), "put_nowait()", api="put_nowait"),
            _ours(_work(size, scale=4), "await put() from 1,000 tasks", api="put_in_tasks"),
            _compiled(_work(size, scale=4)),
            _compiled(_work(size, "unique", scale=4)),
            _ours(_work(size, scale=0.2), "1,000 tasks, each awaits its result", api="put_from_tasks"),
            _ours(_work(size, scale=4), "stock wire path", config={"wire_path": "stock"}),
            _ours(_work(size, scale=4), "CBOR wire path", config={"wire_path": "cbor"}),
            _memory(_work(size)),
        ]
    paced = Workload(100, shard_count=64, record_count=20_000)
    frozen = Row("latency", OURS, paced, "benchmarks.latency", options={"freeze": True}, setting="after gc.freeze()")
    return [*rows, *_latency(paced), frozen, _latency_of_aiokpl(paced)]


def _work(data_bytes: int, keys: Keys = "10k", shard_count: int = 16, *, scale: float = 1) -> Workload:
    record_count = 150_000 if data_bytes == 100 else 30_000
    return Workload(data_bytes, keys, shard_count, int(record_count * scale))


def _ours(workload: Workload, setting: str = "", **options: Any) -> Row:  # noqa: ANN401 - any JSON value
    return Row("workloads", OURS, workload, "benchmarks.end_to_end", options=options, setting=setting)


def _compiled(workload: Workload) -> Row:
    return replace(_ours(workload, "compiled"), directory=DIRECTORY, environment=COMPILED)


def _hot_path(workload: Workload) -> Row:
    return Row("hot_path", OURS, workload, "benchmarks.hot_path")


def _memory(workload: Workload) -> Row:
    return Row("memory", OURS, workload, "benchmarks.memory")


def _latency(workload: Workload) -> list[Row]:
    full_speed = Workload(1024, record_count=workload.record_count * 5)
    return [
        Row("latency", OURS, workload, "benchmarks.latency"),
        Row("latency", OURS, full_speed, "benchmarks.latency", options={"pace": "full"}, setting="as fast as it can"),
    ]


def _latency_of_aiokpl(workload: Workload) -> Row:
    aiokpl = _of_peer(next(peer for peer in PEERS if peer.name == "aiokpl"), workload)
    return replace(aiokpl, kind="latency", workload=workload, program="benchmarks.peer_programs.aiokpl_latency")


def _beside_the_peers(workload: Workload, peers: Iterable[Peer], *, scale: int = 1) -> list[Row]:
    ours = replace(_ours(workload), kind="peers", note="put_many with 1,000 records a call; retries, limits, deadlines")
    return [ours, *(_of_peer(peer, workload, scale=scale) for peer in peers)]


def _over_tls(workload: Workload) -> list[Row]:
    """Return the rows beside the KPL, which speaks only TLS."""
    raw_boto3 = next(peer for peer in PEERS if peer.name == "raw boto3")
    interpreted = [
        replace(_ours(workload, f"{api}()", api=api), kind="over_tls", note="retries, limits, deadlines")
        for api in ("put_many", "put_nowait")
    ]
    compiled = [_compiled_over_tls(workload, api) for api in ("put_many", "put_nowait", "put")]
    cbor = _compiled_over_tls(workload, "put_many", "CBOR wire path", config={"wire_path": "cbor"})
    boto3 = replace(_of_peer(raw_boto3, workload, scale=2), kind="over_tls")
    return [*interpreted, *compiled, cbor, *(_of_rival(rival, workload) for rival in (GO, EXPERT, KPL)), boto3]


def _compiled_over_tls(workload: Workload, api: str, setting: str = "", **options: Any) -> Row:  # noqa: ANN401
    named = ", ".join(filter(None, (f"compiled {api}()", setting)))
    row = _ours(workload, named, api=api, **options)
    return replace(row, kind="over_tls", note="retries, limits, deadlines", directory=DIRECTORY, environment=COMPILED)


def _of_rival(rival: Rival, workload: Workload) -> Row:
    return Row(
        "over_tls",
        rival.name,
        replace(workload, record_count=min(workload.record_count, rival.most_records)),
        "benchmarks.peer_programs.native_rival",
        options=rival.options | {"rival": rival.environment},
        environment=rival.environment,
        note=rival.note,
    )


def _of_peer(peer: Peer, workload: Workload, *, scale: int = 1) -> Row:
    return Row(
        "peers",
        peer.name,
        replace(workload, record_count=min(workload.record_count, peer.most_records * scale)),
        f"benchmarks.peer_programs.{peer.program}",
        python_of(peer.environment),
        options=peer.options,
        environment=peer.environment,
        note=peer.note,
    )
