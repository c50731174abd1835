"""A producer in a thread of its own."""
