"""PROCESS: turns traces into batches, and tells the engines when to adopt new weights.

`build` constructs, `loop` runs and `run_state` persists. `algo` decides what trains.
"""
