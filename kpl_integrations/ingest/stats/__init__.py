"""The counts and metrics of a gateway."""
