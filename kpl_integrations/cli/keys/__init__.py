"""The command `kpl keys`."""
