"""Decode request bodies into user records. Pure functions with bounded memory; every error names its place."""

from kpl_integrations.ingest.decoding.decoded import Decoded, DecodeLimits, DecodeRefusal, RecordProblem
from kpl_integrations.ingest.decoding.otlp_body import otlp_in_steps, otlp_records
from kpl_integrations.ingest.decoding.request_body import (
    CONTENT_TYPES,
    SMALL_BYTES,
    decode,
    decode_plain,
    decode_singles,
    small_body,
)
from kpl_integrations.ingest.decoding.steps import decode_in_steps, pieces_of
from kpl_integrations.ingest.decoding.trace_members import trace_members

__all__ = [
    "CONTENT_TYPES",
    "SMALL_BYTES",
    "DecodeLimits",
    "DecodeRefusal",
    "Decoded",
    "RecordProblem",
    "decode",
    "decode_in_steps",
    "decode_plain",
    "decode_singles",
    "otlp_in_steps",
    "otlp_records",
    "pieces_of",
    "small_body",
    "trace_members",
]
