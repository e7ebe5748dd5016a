"""The commands, one file each.

A command's file is named after it and has `add_arguments(parser)` and `run(args) -> int`, which
returns the exit status. Its docstring is the command's help. The list of commands shows the text
after the colon, and the command's own help shows the other paragraphs. `main` finds the files. They
import heavy modules only in functions, so that help is fast.
"""
