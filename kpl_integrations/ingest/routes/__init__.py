"""One file for each protocol that the gateway accepts records in."""
