"""What is verified before a run starts, and what `sightline doctor` looks at.

`table` lists the checks. `sightline check`, `sightline doctor` and the start of a run use it.
"""
