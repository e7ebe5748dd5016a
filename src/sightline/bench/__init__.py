"""Benchmarks, each against a baseline in the same run. Nothing but `cli` imports this room.

A benchmark is a module with `add_arguments` and `run`: `sightline bench NAME`. It is imported when
it is asked for. `harness` has what measures and what is measured with: recordings, scripted
policies and agents, synthetic runs, rehearsals.
"""

from __future__ import annotations

BENCHMARKS = {
    "batch": "many requests at once, against generate",
    "cost": "what micro-batches cost, predicted and measured",
    "failover": "what lost servers cost the rollouts that were with them",
    "generic": "the price of the generic family, beside a native one",
    "lag": "time for the same steps with max_lag 0 and 1",
    "load": "a small request beside a thousand rollouts",
    "loop": "the whole system on one device, and where its seconds go",
    "materialize": "images to patches, beside transformers' image processors",
    "mismatch": "reward and gradient against mismatch, with each correction",
    "publish": "from an optimizer step to the first token of its version",
    "render": "time and memory of a turn with a new screenshot",
    "rollout": "memory and bytes on the wires of long rollouts",
    "scale": "a training step against batch, images, ranks and turns",
    "serve": "tokens per second of the embedded engine",
    "simulate": "small runs as the simulation says, and as they are",
    "soak": "memory, descriptors and threads of a long run",
    "stall": "how long the event loop of a worker stands still",
    "step": "a training step against the machine's limit, and trees",
    "store": "images into and out of every kind of store",
    "train": "a trainer's step, taken apart",
    "trl": "the demo's training step beside TRL's",
    "view": "index and page a run of many rollouts",
}
"""The module of each benchmark, and what it measures."""
