"""Benchmarks for your own hardware: `sightline bench loop | step | serve`.

Each is a module with `add_arguments(parser)` and `run(args) -> int`, imported when it is called.
Only `cli` imports this room. More benchmarks are in `benchmarks/` of a checkout.
"""

from __future__ import annotations

BENCHMARKS = {
    "loop": "a whole run on one device, and how each process spends its time",
    "serve": "tokens per second of the inference server",
    "step": "a training step, compared with the GPU's peak and with transformers",
}
"""The subject of each benchmark, by module name."""
