"""Which bodies are decoded at once."""

import gzip
import itertools
from typing import Any

import pytest
import zstandard

from kpl_integrations.ingest.decoding import DecodeLimits, DecodeRefusal, decode, otlp_records, request_body, small_body


@pytest.mark.parametrize(
    ("encoding", "body", "is_small"),
    [
        (None, b"x" * 131_072, True),
        (None, b"x" * 131_073, False),
        (None, b"{}" * 20_000, False),
        (b"gzip", gzip.compress(b"x" * 131_072), True),
        (b"gzip", gzip.compress(b"x" * 131_073), False),
        # Of two members only the last one says its size.
        (b"gzip", gzip.compress(b"x" * 131_072) + gzip.compress(b"x"), False),
        (b"zstd", zstandard.compress(b"x" * 131_072), True),
        (b"zstd", zstandard.compress(b"x" * 131_073), False),
    ],
    ids=itertools.count(),
)
def test_only_bodies_that_are_decoded_in_no_time_are_small(encoding, body, is_small):
    assert (small_body(encoding, body, 1 << 24) is not None) is is_small


@pytest.mark.parametrize("encoding", [b"gzip", b"zstd"])
def test_a_body_that_says_that_it_is_large_is_not_decompressed_to_find_out(encoding, monkeypatch):
    monkeypatch.setattr(request_body, "inflate", None)
    compress: Any = {b"gzip": gzip.compress, b"zstd": zstandard.compress}[encoding]
    body = compress(b"x" * 131_073)
    assert small_body(encoding, body, 1 << 24) is None


EXPECTED = {
    "application/json": "one record, or many as",
    "application/cloudevents+json": "a CloudEvent",
    "application/cloudevents-batch+json": "an array of CloudEvents",
}


@pytest.mark.parametrize("body", [b"", b" \r\n\t"])
def test_the_refusal_of_an_empty_body_says_what_was_expected(body):
    for content_type, what in EXPECTED.items():
        with pytest.raises(DecodeRefusal, match=f"the body is empty; send {what}"):
            decode(content_type, body, limits=DecodeLimits(), headers={})
    with pytest.raises(DecodeRefusal, match="the body is empty; send an export request in JSON"):
        otlp_records("logs", "application/json", body, limits=DecodeLimits(), partition_key="key")
