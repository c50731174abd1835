"""Where user records wait before aggregation: for the disk (write-ahead), or for their flow's turn (fair queuing)."""
