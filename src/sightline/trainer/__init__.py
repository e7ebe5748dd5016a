"""PROCESS: batches of samples in, weights out. `build` constructs, `loop` runs."""
