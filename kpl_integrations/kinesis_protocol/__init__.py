"""The Kinesis wire protocol for servers: decodes requests, verifies signatures, encodes answers, in JSON or CBOR.

Pure: it does no I/O. `local_kinesis` and the ingest gateway use it.
"""
