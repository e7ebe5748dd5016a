"""What the benchmarks share: recorded and synthetic runs, scripted agents, baselines, meters."""
