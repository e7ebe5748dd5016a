"""Shared benchmark code: recorded and synthetic runs, scripted agents, baselines, meters."""
