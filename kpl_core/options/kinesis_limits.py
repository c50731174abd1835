"""Quotas of Amazon Kinesis Data Streams, each with the AWS page that states it.

The sources are "Quotas and limits" and the API pages of PutRecords, ListShards and UpdateMaxRecordSize (2025:
records up to 10 MiB, requests up to 10 MiB).
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * 1024

# API_PutRecords
RECORDS_PER_REQUEST: Final = 500
REQUEST_BYTES: Final = 10 * MIB
PARTITION_KEY_CHARACTERS: Final = 256
STREAM_ARN_CHARACTERS: Final = 2_048
HASH_KEY_BITS: Final = 128
MAX_HASH_KEY: Final = (1 << HASH_KEY_BITS) - 1

# "Quotas and limits": the largest record of a new stream, and the largest that UpdateMaxRecordSize can allow
DEFAULT_MAX_RECORD_BYTES: Final = 1 * MIB
MAX_RECORD_BYTES: Final = 10 * MIB

# "Quotas and limits": the write capacity of one shard
RECORDS_PER_SECOND_PER_SHARD: Final = 1_000.0
BYTES_PER_SECOND_PER_SHARD: Final = 1_048_576.0

# API_ListShards
SHARDS_PER_PAGE: Final = 1_000
