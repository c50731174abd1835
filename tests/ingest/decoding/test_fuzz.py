"""Arbitrary and nearly valid bodies are decoded or rejected. None raises another exception.

A second's worth in the plain suite; `TESTS_FUZZ_SECONDS=60 pytest tests/ingest/decoding/test_fuzz.py` runs on.
"""

import gzip
import os
import random
import resource
import time

import pytest
import zstandard

from kpl_core.records.user_record import check_user_record
from kpl_integrations.ingest.decoding import (
    CONTENT_TYPES,
    DecodeLimits,
    DecodeRefusal,
    decode,
    decode_plain,
    otlp_records,
)
from kpl_integrations.ingest.decoding.decoded import NeighbourKeys
from kpl_integrations.ingest.decoding.inflate import inflate
from kpl_integrations.ingest.decoding.otlp_body import JSON, PROTOBUF, RESOURCES

LIMITS = DecodeLimits(max_records=50, max_record_bytes=2048, max_depth=16)
SECONDS = float(os.environ.get("TESTS_FUZZ_SECONDS", "1"))
CE = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}
SEEDS = [
    b'{"resourceLogs":[{"scopeLogs":[]}, {}]}',
    b"\x0a\x03abc\x0a\x00\x12\x02xy",
    b'{"partition_key":"k","data":"text \\u00e9 \xc3\xa9"}',
    b'{"records":[{"partition_key":"k","data":{"a":[1,2.5e3,null,true]}},{"data_base64":"AAEC"}]}',
    b'{"partition_key":"k","data":"x","explicit_hash_key":"12"}\n{"data":[1]}\n\n{"data":"y"}\r\n',
    b'[{"specversion":"1.0","id":"1","source":"s","type":"t","data":{}},{"specversion":"1.0"}]',
    b'{"specversion":"1.0","id":"1","source":"s","type":"t","partitionkey":"p","data_base64":"AA=="}',
    b'{"data":' + b"[" * 40 + b"]" * 40 + b"}",
    b'{"data":"\\ud83d\\ude00 \\ud800"}',
]
PIECES = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\x00", b"\xff", b"\xed\xa0\x80", b"null", b"1e999",
          b"\\u", b'"data"', b'"records"', b"[" * 2000, b'{"a":' * 2000]  # fmt: skip


def mutated(random_: random.Random, seed: bytes) -> bytes:
    body = bytearray(seed)
    for _ in range(random_.randint(0, 6)):
        at = random_.randint(0, len(body))
        match random_.randrange(5):
            case 0:
                body[at:at] = random_.choice(PIECES)
            case 1:
                del body[at : at + random_.randint(1, 8)]
            case 2:
                body[at : at + 1] = random_.randbytes(1)
            case 3:
                body = body[:at]
            case 4:
                body[at:at] = body[: random_.randint(0, 64)]
    return bytes(body)


@pytest.mark.timeout(SECONDS + 60)
def test_every_body_is_decoded_or_rejected():
    random_ = random.Random(int(os.environ.get("TESTS_FUZZ_SEED", "1")))
    ends_at = time.monotonic() + SECONDS
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds = slowest = 0.0
    while rounds < 300 or time.monotonic() < ends_at:
        rounds += 1
        seed = random_.choice(SEEDS) if random_.random() < 0.95 else random_.randbytes(random_.randint(0, 300))
        body = mutated(random_, seed)
        headers = {**CE, "ce-x": mutated(random_, b"%41\xe9").decode("latin-1")} if random_.random() < 0.2 else {}
        headers["x-partition-key"] = mutated(random_, b"key").decode("latin-1")
        encoding = random_.choice([None, "gzip", "zstd"])
        if encoding is not None:
            body = gzip.compress(body, 1) if encoding == "gzip" else zstandard.compress(body, 1)
            if random_.random() < 0.5:
                body = mutated(random_, body)
        content_type = random_.choice([*CONTENT_TYPES, "text/plain", "application/json; charset=utf-8"])
        started_at = time.thread_time()
        try:
            plain = inflate(encoding, body, max_inflated_bytes=100_000)
            if random_.random() < 0.3:
                signal, media_type = random_.choice(sorted(RESOURCES)), random_.choice([JSON, PROTOBUF])
                stored = otlp_records(signal, media_type, plain, limits=LIMITS, partition_key="k")
                assert all(len(record.data) < LIMITS.max_record_bytes for record in stored)
            decoded = decode(content_type, plain, limits=LIMITS, headers=headers)
        except DecodeRefusal as refusal:
            assert refusal.status in {400, 413, 415}  # noqa: PT017 - any other exception fails the test
            assert refusal.detail.isprintable()  # noqa: PT017
        else:
            # The fast decoder, if it applies, agrees with the complete one.
            pairs = (
                decode_plain(content_type, plain, LIMITS, NeighbourKeys(lambda: "k"))
                if "ce-specversion" not in headers
                else None
            )
            if pairs is not None:
                thorough = decode(
                    content_type, plain, limits=LIMITS, headers=headers, new_key=lambda: "k", is_plain=False
                )
                assert [(record.partition_key, record.data) for record in thorough.records] == pairs
                assert not thorough.problems
            assert sorted(decoded.positions() + [each.index for each in decoded.problems]) == list(
                range(len(decoded.records) + len(decoded.problems))
            )
            for record in decoded.records:
                check_user_record(record, max_record_bytes=LIMITS.max_record_bytes)
            for problem in decoded.problems:
                assert problem.detail.isprintable()
                assert problem.field.isprintable()
        slowest = max(slowest, time.thread_time() - started_at)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert slowest < 1.0, slowest
    assert grown_kib < 200_000, grown_kib
