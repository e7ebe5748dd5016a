"""Torch that engine and trainer share: attention, logprobs of chosen tokens, weight files."""
