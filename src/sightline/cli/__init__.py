"""The commands, one file each.

A command's file is named after it and has `add_arguments(parser)`, and `run(args) -> int`, which
returns the exit status. Its docstring is the command's help: what stands after the colon in the
list of commands, the rest above its options. `main` finds the files. At their top they import
nothing heavy, so that help is quick.
"""
