"""The command `kpl tail`."""
