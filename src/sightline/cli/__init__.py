"""The commands, one file each.

A command's file is named after it and has `add(subparsers)`, which declares its arguments, and
`run(args) -> int`, which returns the exit status. `main` finds the files; files named `bench_*`
become `sightline bench *`. At their top they import nothing heavy, so that help is quick.
"""
