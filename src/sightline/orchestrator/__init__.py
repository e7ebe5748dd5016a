"""PROCESS: turns traces into batches, and tells the engines when to adopt new weights.

`build` constructs it, `loop` runs it, `run_state` persists it, and `algo` selects what trains.
"""
