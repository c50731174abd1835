"""Which streams exist, and calls to Kinesis about them."""
