"""PutRecords and ListShards over aiobotocore."""
