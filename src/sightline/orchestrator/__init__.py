"""PROCESS: traces in, batches out, and the engines told when to adopt.

`build` constructs, `loop` runs, `run_state` remembers; `algo` decides what trains.
"""
