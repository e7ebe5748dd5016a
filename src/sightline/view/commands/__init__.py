"""Commands that only read. Each is a module with `add_arguments` and `run`, as in `cli`."""
