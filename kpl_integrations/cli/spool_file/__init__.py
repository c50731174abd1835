"""`kpl spool` and `kpl dlq`: the records and the dead letters of a spool file."""
