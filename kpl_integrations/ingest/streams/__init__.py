"""Look up streams, and forward questions about them to Kinesis."""
