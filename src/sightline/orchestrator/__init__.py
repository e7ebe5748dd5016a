"""PROCESS: traces in, batches out, and the engines told when to adopt.

`build` constructs, `loop` runs, `judge` and `credit` decide, `progress` remembers.
"""
