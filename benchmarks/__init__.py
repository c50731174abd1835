"""Measured speed: what a user record costs here and in the alternatives, in one run.

`python -m benchmarks` prints the table and writes `docs/benchmarks/`. The unit is user records per
CPU-second of the producing process (user + system time of all its threads): wall time on shared
cores also measures other programs. How a figure is measured, step by step:

    __main__ -> plan (what is measured) -> rounds (interleaved, each trial a fresh process)
        -> end_to_end | hot_path | latency | memory | peer_programs.*   (the producing process, one core)
        -> sink_process (the other core), whose ledger checks every user record after the run
    -> figures (median, range, paired ratio) -> table, plot
"""
