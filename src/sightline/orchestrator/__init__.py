"""PROCESS: traces in, batches out, and the engines told when to adopt.

`process` constructs and connects, `loop` runs, `run_state` remembers; `algo` decides what trains.
"""
