"""Decide whether a request is accepted: quota, fair share, room in the buffer, and the answer to a rejected client."""
