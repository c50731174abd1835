"""Replay: puts the records of a spool again, in order and at a limited pace."""
