"""Benchmarks, each against a baseline in the same run, and what only they need.

A module with `add` and `run` is a command, `sightline bench NAME`; the others record, rehearse or
make up what the benchmarks measure. Nothing but `cli` imports this room.
"""
