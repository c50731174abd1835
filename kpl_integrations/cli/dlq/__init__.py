"""The command `kpl dlq`."""
