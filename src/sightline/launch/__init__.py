"""Check a run before it starts, and start, watch and stop its processes."""
