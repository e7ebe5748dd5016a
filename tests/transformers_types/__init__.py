"""Try every image-and-text type of the installed transformers.

`build` writes a tiny random checkpoint of a type. `trial` loads it as a run does, and compares a
training pass with plain transformers. `python -m tests.transformers_types` runs each type in its
own process and writes the table of docs/transformers_types.md.
"""
