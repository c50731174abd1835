"""The command `kpl doctor`."""
