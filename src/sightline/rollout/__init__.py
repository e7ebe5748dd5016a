"""Playing tasks: the handle behind Chat, the generate client, the worker processes.

Nothing here loads torch or transformers.
"""
