"""The command `kpl put`."""
