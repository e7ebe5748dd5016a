"""Rollouts: chat implementations, the client for inference servers, and worker processes.

Nothing here loads torch or transformers.
"""
