"""The machine of one request: head, who, may it, body, decode, put, answer. Synchronous; see `request.py`."""
