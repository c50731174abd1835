"""The command `kpl serve`."""
