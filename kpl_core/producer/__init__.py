"""The effectful ring around the pipelines: clock, tasks, network."""
