"""The emulators of Kinesis, their abilities, and how each is started.

The tests read the table `Abilities`: no test uses what an emulator does not support or does wrong, and
no test asserts it as right. docs/interop.md says the same in words, with more of the faults.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.installation import INTEROP, Installed
from tests.support.processes import (
    LOOPBACK,
    OwnProcess,
    ProcessFailed,
    answers,
    free_ports,
    listens_only_on_loopback,
    own_process,
)

MIB = 1024 * 1024
STARTS = 3  # another process may take a free port before the emulator does


def utf16_units(key: str) -> int:
    """Return the UTF-16 units of a key: two for a character beyond U+FFFF."""
    return len(key.encode("utf-16-le")) // 2


def utf8_bytes(key: str) -> int:
    """Return the bytes of a key."""
    return len(key.encode())


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What an emulator supports.

    Attributes:
        reshards: SplitShard and MergeShards, and records then go to the children.
        update_shard_count: UpdateShardCount, likewise.
        key_length: how it counts the 256 characters that a partition key may have.
        ending_hash_key: an explicit hash key equal to a shard's EndingHashKey.
        max_record_bytes: the largest record that can be put and read, after UpdateMaxRecordSize where it exists.
        cbor: the wire protocol application/x-amz-cbor-1.1.
        stream_arn: StreamARN in place of StreamName.
        throttles: each shard takes 1,000 records and 1 MiB a second, and no more.
    """

    reshards: bool
    update_shard_count: bool
    key_length: Callable[[str], int]
    ending_hash_key: bool
    max_record_bytes: int
    cbor: bool
    stream_arn: bool
    throttles: bool = False


@dataclass(frozen=True)
class Emulator:
    """A running emulator."""

    name: str
    endpoint_url: str
    abilities: Abilities
    process: OwnProcess
    tls_endpoint_url: str | None = None

    def __str__(self) -> str:
        return self.name


ABILITIES = {
    "kinesis-local": Abilities(
        reshards=True,
        update_shard_count=True,
        key_length=utf16_units,
        ending_hash_key=True,
        max_record_bytes=10 * MIB - 256,  # the last bytes can be put, but GetRecords answers with 500
        cbor=True,
        stream_arn=True,
    ),
    "kinesalite": Abilities(
        reshards=True,
        update_shard_count=False,
        key_length=utf16_units,
        ending_hash_key=True,
        max_record_bytes=1 * MIB,
        cbor=True,
        stream_arn=False,
    ),
    "moto": Abilities(
        reshards=False,
        update_shard_count=False,
        key_length=len,
        ending_hash_key=False,
        max_record_bytes=1 * MIB,
        cbor=False,
        stream_arn=True,
    ),
    "ferrokinesis": Abilities(
        reshards=True,
        update_shard_count=True,
        key_length=utf8_bytes,
        ending_hash_key=True,
        max_record_bytes=1 * MIB,
        cbor=True,
        stream_arn=True,
        throttles=True,
    ),
}


@contextmanager
def running_emulator(name: str, installed: Installed, *, logs: Path) -> Iterator[Emulator]:
    """Run one emulator, listening on loopback only, while the context lasts.

    Raises:
        ProcessFailed: it did not start, or listens on another interface.
    """
    for start in range(1, STARTS + 1):
        port, tls_port = free_ports(2)
        command, environment = _COMMANDS[name](installed, port, tls_port)
        with own_process(name, command, environment=environment, logs=logs) as process:
            try:
                process.wait_until(lambda port=port: answers(port), what=f"answer on port {port}")  # type: ignore[misc]
            except ProcessFailed:
                if start == STARTS:
                    raise
                continue
            if not (listens_only_on_loopback(port) and listens_only_on_loopback(tls_port)):
                message = f"{name} listens on other interfaces than loopback"
                raise ProcessFailed(message)
            yield Emulator(
                name=name,
                endpoint_url=f"http://{LOOPBACK}:{port}",
                abilities=ABILITIES[name],
                process=process,
                tls_endpoint_url=f"https://{LOOPBACK}:{tls_port}" if name == "kinesis-local" else None,
            )
            return


def _kinesis_local(installed: Installed, port: int, tls_port: int) -> tuple[list[str], dict[str, str]]:
    package = installed.node_modules / "kinesis-local"
    command = [
        installed.node.executable,
        "--require",
        str(INTEROP / "npm" / "loopback_only.cjs"),
        str(package / "main.js"),
    ]
    quick = dict.fromkeys(
        [
            f"{change}_DURATION"
            for change in ("CREATE_STREAM", "DELETE_STREAM", "SPLIT_SHARD", "MERGE_SHARDS", "UPDATE_SHARD_COUNT")
        ],
        "10ms",
    )
    return command, {
        "KINESIS_MOCK_CERT_PATH": str(package / "server.json"),  # otherwise it is searched in the working directory
        "KINESIS_MOCK_PLAIN_PORT": str(port),
        "KINESIS_MOCK_TLS_PORT": str(tls_port),
        "SHARD_LIMIT": "200",
        "LOG_LEVEL": "ERROR",
        **quick,
    }


def _kinesalite(installed: Installed, port: int, _: int) -> tuple[list[str], dict[str, str]]:
    preloads = [
        argument
        for name in ("loopback_only.cjs", "survive_aborted_requests.cjs")
        for argument in ("--require", str(INTEROP / "npm" / name))
    ]
    program = str(installed.node_modules / "kinesalite" / "cli.js")
    quick = [argument for change in ("create", "delete", "update") for argument in (f"--{change}StreamMs", "10")]
    return [installed.node.executable, *preloads, program, "--port", str(port), "--shardLimit", "200", *quick], {}


def _moto(installed: Installed, port: int, _: int) -> tuple[list[str], dict[str, str]]:
    return [str(installed.moto_python), str(INTEROP / "moto_server.py"), str(port)], {}


def _ferrokinesis(installed: Installed, port: int, _: int) -> tuple[list[str], dict[str, str]]:
    place = installed.ferrokinesis
    assert place is not None
    quick = [argument for change in ("create", "delete", "update") for argument in (f"--{change}-stream-ms", "10")]
    command = [
        str(place / "bin" / "ferrokinesis"),
        *("--port", str(port), "--shard-limit", "200", "--enforce-limits", "true", "--log-level", "error", *quick),
    ]
    return command, {"LD_PRELOAD": str(place / "loopback_only.so")}


_COMMANDS = {
    "kinesis-local": _kinesis_local,
    "kinesalite": _kinesalite,
    "moto": _moto,
    "ferrokinesis": _ferrokinesis,
}
