"""Content-Encoding, and the bound of the decompressed size."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, strategies as st

from kpl_integrations.ingest.decoding import DecodeRefusal
from kpl_integrations.ingest.decoding.inflate import inflate

MIB = 1024 * 1024


def streamed_zstd(data: bytes) -> bytes:
    """Compress without a declared size, as a streaming client does."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    " ZSTD ": streamed_zstd,
    "X-GZip": gzip.compress,
}


def refused(encoding: str, body: bytes, most: int = MIB) -> DecodeRefusal:
    with pytest.raises(DecodeRefusal) as raised:
        inflate(encoding, body, max_inflated_bytes=most)
    return raised.value


@given(st.binary(max_size=2000), st.sampled_from(sorted(ENCODERS)), st.integers(1, 3))
def test_a_compressed_body_is_restored(data, encoding, times):
    compress = ENCODERS[encoding]
    assert inflate(encoding, compress(data) * times, max_inflated_bytes=6000) == data * times


@pytest.mark.parametrize("encoding", [None, "", "identity"])
def test_a_body_without_encoding_is_returned_unchanged(encoding):
    body = b"x" * 10
    assert inflate(encoding, body, max_inflated_bytes=10) is body
    assert refused("identity", body, 9).status == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd", " ZSTD "])
def test_one_byte_above_the_bound_is_too_large(encoding):
    body = ENCODERS[encoding](b"x" * 1000)
    assert inflate(encoding, body, max_inflated_bytes=1000) == b"x" * 1000
    assert refused(encoding, body, 999).status == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd", " ZSTD "])
def test_a_decompression_bomb_is_rejected_without_inflating_it(encoding):
    bomb = ENCODERS[encoding](bytes(64 * MIB))
    tracemalloc.start()
    try:
        assert refused(encoding, bomb).status == 413
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip", "zstd", " ZSTD "])
def test_every_truncation_and_any_trailing_bytes_are_rejected(encoding):
    body = ENCODERS[encoding](b"some data " * 20)
    for length in range(len(body)):
        assert refused(encoding, body[:length]).code == "encoding"
    assert refused(encoding, body + b"rest").code == "encoding"


def test_a_body_of_many_members_is_rejected_before_each_costs_a_decoder():
    assert refused("gzip", gzip.compress(b"") * 10_000).code == "encoding"
    assert refused("zstd", zstandard.compress(b"") * 10_000).code == "encoding"


@pytest.mark.parametrize("encoding", ["gzip,", ", gzip", "identity, gzip", "gzip,\tidentity,,"])
def test_empty_elements_and_identity_are_ignored(encoding):
    assert inflate(encoding, gzip.compress(b"x"), max_inflated_bytes=10) == b"x"


@pytest.mark.parametrize("declared", [1, 50_000, 200_000])
def test_a_frame_that_declares_a_wrong_size_is_rejected(declared):
    frame = zstandard.compress(bytes(100_000))
    assert frame[5:9] == (100_000).to_bytes(4, "little")
    assert refused("zstd", frame[:5] + declared.to_bytes(4, "little") + frame[9:]).code == "encoding"


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "gzip, zstd", "gzip, br, identity", "gzip\r\n"])
def test_another_encoding_is_unsupported(encoding):
    if encoding.strip() == "gzip":
        assert inflate(encoding, gzip.compress(b"x"), max_inflated_bytes=10) == b"x"
        return
    refusal = refused(encoding, zlib.compress(b"x"))
    assert (refusal.status, refusal.code) == (415, "unsupported-content-encoding")
