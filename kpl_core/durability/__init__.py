"""Nothing lost: circuit breakers, spill and write-ahead rules, dead letters, replay and redrive."""
