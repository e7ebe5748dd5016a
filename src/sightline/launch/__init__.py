"""Starts, watches and stops the processes of a run; refuses, before that, what cannot work."""
