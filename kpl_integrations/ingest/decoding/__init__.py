"""Decode request bodies into user records. Pure functions with bounded memory; every error names its place."""

from kpl_integrations.ingest.decoding.decoded import Decoded, DecodeLimits, DecodeRefusal, RecordProblem
from kpl_integrations.ingest.decoding.inflate import inflate
from kpl_integrations.ingest.decoding.otlp_body import otlp_records
from kpl_integrations.ingest.decoding.request_body import CONTENT_TYPES, decode, decode_plain

__all__ = [
    "CONTENT_TYPES",
    "DecodeLimits",
    "DecodeRefusal",
    "Decoded",
    "RecordProblem",
    "decode",
    "decode_plain",
    "inflate",
    "otlp_records",
]
