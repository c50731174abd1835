"""The command `kpl top`."""
