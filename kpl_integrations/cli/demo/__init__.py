"""The command `kpl demo`."""
