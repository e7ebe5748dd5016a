"""Benchmarks that reproduce the figures of the documentation: `python -m benchmarks NAME`.

They run from a checkout and are not part of the package, which has `sightline bench loop`, `step`
and `serve`. A benchmark is a module with `add_arguments(parser)` and `run(args) -> int`.
`harness/` has the code that only benchmarks need.
"""

from __future__ import annotations

BENCHMARKS = {
    "algorithms": "every algorithm by name, on two tasks with several seeds",
    "batch": "many requests at once, compared with transformers' generate",
    "failover": "the delay that lost servers cause to their rollouts",
    "forks": "forked rollouts and flat groups, on two tasks with several seeds",
    "load": "the latency of a small request while a thousand rollouts run",
    "materialize": "images to patches, compared with transformers' image processors",
    "mismatch": "reward and gradient under sampler-trainer mismatch, with each correction",
    "publish": "the time from an optimizer step to the first token of its version",
    "render": "time and memory of a turn with a new screenshot",
    "rollout": "memory and network traffic of long rollouts",
    "soak": "memory, file descriptors and threads of a long run",
    "store": "throughput of each kind of image store",
    "trl": "the demo's training step, compared with TRL's",
}
"""The subject of each benchmark, by module name."""
