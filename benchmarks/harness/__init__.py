"""Code that only benchmarks need: measured parts, baselines and processes under observation."""
