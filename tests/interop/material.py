"""The user records of the tests: every kind of key and data that Kinesis accepts, reproducible."""

from collections.abc import Callable
from random import Random

from tests.interop.ledger import PutUserRecord
from tests.interop.streams import Shard

LARGEST_HASH_KEY = 2**128 - 1
LONGEST_KEY = 256

# 256 characters is the longest key Kinesis accepts: characters, not bytes or UTF-16 units.
KEYS = {
    "one character": "k",
    "longest ASCII": "a" * 256,
    "longest of two bytes": "ß" * 256,
    "longest of three bytes": "漢" * 256,
    "longest astral": "🦉" * 256,
    "highest code point": "\U0010ffff",
    "highest before the surrogates, lowest after": "\ud7ff\ue000",
    "composed": "é",
    "decomposed": "e\u0301",
    "right to left": "مفتاح התקסטה",
    "zero-width joiner": "👩‍👩‍👧",
    "line ends": "a\r\nb\u2028c\u2029d\u0085e",
    "controls": "\x01\t\x1f\x7f",
    "NUL": "\x00",
    "byte order mark": "\ufeffkey",
    "JSON": '{"key": "\\u0041"}',
    "blanks around": "  key  ",
    "digits": "007",
}

DATA = {
    "empty": b"",
    "one zero": b"\x00",
    "every byte": bytes(range(256)),
    "not UTF-8": b"\xff\xfe\xc3\x28",
    "UTF-8": "höchst 🦉".encode(),
    "JSON": b'{"a": [1, 2.5, null]}',
    "base64": b"aGVsbG8=",
    "varint edge 127": b"x" * 127,
    "varint edge 128": b"x" * 128,
    "varint edge 16383": b"y" * 16_383,
    "varint edge 16384": b"y" * 16_384,
}


def fitting(key: str, key_length: Callable[[str], int]) -> str:
    """Return a key of one repeated character, shortened for an emulator that counts more than one for each."""
    return key[: LONGEST_KEY * len(key) // max(key_length(key), LONGEST_KEY)]


def every_key_and_data(key_length: Callable[[str], int] = len) -> list[PutUserRecord]:
    """Return every key with every data once, the keys not longer than 256 as `key_length` counts them."""
    return [PutUserRecord(fitting(key, key_length), data) for key in KEYS.values() for data in DATA.values()]


def numbered(count: int, *, seed: int, keys: int = 50, longest_bytes: int = 300) -> list[PutUserRecord]:
    """Return `count` different records of random sizes on a few keys."""
    chance = Random(seed)
    return [
        PutUserRecord(f"key-{chance.randrange(keys)}", f"{seed}/{number} ".encode() + chance.randbytes(size))
        for number, size in enumerate(chance.choices(range(longest_bytes), k=count))
    ]


def at_the_edges(shards: tuple[Shard, ...], *, ending_hash_keys: bool = True) -> list[PutUserRecord]:
    """Return records whose explicit hash keys are the first and last ones of each shard.

    `ending_hash_keys` False leaves out the last ones, for an emulator known to reject them.
    """
    edges = [0, 1, *(shard.starting_hash_key for shard in shards)]
    if ending_hash_keys:
        edges += [LARGEST_HASH_KEY, *(shard.ending_hash_key for shard in shards)]
    edges += [shard.ending_hash_key - 1 for shard in shards]
    return [
        PutUserRecord("the same key", f"{copy} at {edge}".encode(), str(edge))
        for edge in sorted(set(edges))
        for copy in range(3)
    ]
