"""Whether a request is accepted: quota, fair share, room, and what a rejected client is told."""
