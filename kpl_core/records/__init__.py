"""What is put, sent and answered: user record, Kinesis record, aggregated record, PutRecords request, result."""
