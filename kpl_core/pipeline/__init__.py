"""The journey of a record through one stream, synchronous and without a clock."""
