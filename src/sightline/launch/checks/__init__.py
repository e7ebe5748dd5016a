"""Checks before a run starts, and the checks of `sightline doctor`.

`table` lists the checks. `sightline check`, `sightline doctor` and the start of a run use it.
"""
