"""The stores; each imports what it needs, and only its own file does."""
