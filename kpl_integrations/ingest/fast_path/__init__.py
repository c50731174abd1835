"""The fast path: a connection that answers most requests without a task and without ASGI messages."""
