"""The HTTP routes: one file for each protocol, and one for resources such as health and metrics."""
