"""Decoding steps of the embedded engine against the memory's limit, in this process.

A step cannot be shorter than it takes to read the weights of the language model and the keys and
values of all rows once. The memory bandwidth is that of a copy measured in the same run.
"""

from __future__ import annotations

import argparse
import queue
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.bench.harness.plain_generate import BaselineRequest, TransformersBaseline
from sightline.bench.harness.speed import measure_copy_bandwidth
from sightline.compute.model import pick_device
from sightline.families import Forward, load_family, load_renderer
from sightline.inference.engine import EngineRequest
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaStore
from sightline.pixels import Materializer
from sightline.wire.generate import SamplingParams

PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class GenerateSpeed:
    """The decoding speed of transformers."""

    keys: float
    step_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class DecodeSpeed:
    """The speed of the engine's steps that compute no prompt, while no row is idle."""

    rows: float
    """Mean number of rows that decode in a step."""
    keys: float
    """Tokens whose keys and values a step reads."""
    step_ms: float
    tokens_per_s: float
    """Sampled until the last row is done, the time of the prompts included."""
    weight_bytes: int
    key_bytes: int
    """Size of one token's keys and values."""
    bandwidth: float

    def compute_share(self, keys: float, step_ms: float) -> float:
        """Return the share of a step's time that reading its bytes at the bandwidth takes."""
        read = self.weight_bytes + keys * self.key_bytes
        return read / self.bandwidth * 1e3 / step_ms


def draw_prompts(rows: int, args: argparse.Namespace, ids: range) -> list[list[int]]:
    """Prompts of mixed lengths; half as many again as rows, so that rows leave and join."""
    rng = random.Random(rows)
    low, high = args.lengths
    sizes = [rng.randint(low, high - args.max_tokens) for _ in range(rows + rows // 2)]
    return [rng.choices(ids, k=size) for size in sizes]


def build_bench_spec(args: argparse.Namespace, media: Path, **values: Any) -> ServerSpec:
    """Build the spec of an engine that keeps nothing of a finished request."""
    return ServerSpec.of(
        path=args.model,
        media_roots=(media,),
        device=pick_device(args.device),
        dtype=args.dtype,
        threads=args.threads,
        enable_prefix_caching=False,
        **values,
    )


def measure_engine(
    args: argparse.Namespace, rows: int, media: Path, exact: bool = False
) -> DecodeSpeed:
    device = pick_device(args.device)
    bandwidth = measure_copy_bandwidth(device)
    family, store = load_family(args.model), MediaStore(media)
    banned = load_renderer(args.model, store, family).pad_token_ids
    spec = build_bench_spec(
        args,
        media,
        exact=exact,
        max_num_seqs=rows,
        max_model_len=args.lengths[1],
        prefill_chunk_tokens=PREFILL_CHUNK,
    )
    engine = build_engine(spec, family, Materializer(family, store, 1 << 20), banned)
    prompts = draw_prompts(rows, args, range(min(banned)))
    weights = count_read_bytes(engine.runner.forward)
    done: queue.SimpleQueue[list[EngineRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    after: dict[str, float] = {}
    try:
        for _ in range(2):  # once before, for the shapes
            before, began = engine.totals(), time.perf_counter()
            engine.submit([_build_request(i, p, args) for i, p in enumerate(prompts)])
            left = len(prompts)
            after.clear()
            while left:
                finished = done.get()
                left -= len(finished)
                for error in filter(None, (request.error for request in finished)):
                    raise error
                if left <= rows and not after:  # nobody waits for a row: they fall idle
                    after.update(engine.totals())
            seconds, sampled = time.perf_counter() - began, engine.totals()["sampled_tokens"]
    finally:
        engine.stop()
        engine.join(60)
    found = {name: after[name] - before[name] for name in after}
    steps = max(found["decode_steps"], 1)
    return DecodeSpeed(
        rows=found["decode_tokens"] / steps,
        keys=found["decode_keys"] / steps,
        step_ms=found["decode_seconds"] / steps * 1e3,
        tokens_per_s=(sampled - before["sampled_tokens"]) / seconds,
        weight_bytes=weights,
        key_bytes=engine.runner.kv.token_bytes,
        bandwidth=bandwidth,
    )


def _build_request(index: int, prompt: list[int], args: argparse.Namespace) -> TorchRequest:
    count = args.max_tokens - (index % 4) * (args.max_tokens // 8)
    params = SamplingParams(max_tokens=count, temperature=1.0)
    return TorchRequest(np.array(prompt, dtype=np.int32), [], [], params, seed=index)


def count_read_bytes(forward: Forward) -> int:
    """Bytes of weights that a decoding step reads: not the tower's, and of an embedding that is not
    the output's too, a few rows."""
    model: Any = forward.model
    tower = {id(p) for _, p in forward.vision_parameters()}
    looked_up = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is looked_up:
        looked_up = None
    parameters = [p for p in model.parameters() if id(p) not in tower and p is not looked_up]
    return sum(p.nbytes for p in parameters)


def measure_generate(args: argparse.Namespace, rows: int, media: Path) -> GenerateSpeed | None:
    """transformers' `generate` on as many prompts as rows, padded; None where memory is short."""
    family = load_family(args.model)
    banned = load_renderer(args.model, MediaStore(media), family).pad_token_ids
    plain = TransformersBaseline(args.model, family, args.device, args.dtype, banned)
    prompts = draw_prompts(rows, args, range(min(banned)))[:rows]
    asked: list[BaselineRequest] = [(prompt, [], []) for prompt in prompts]
    seconds = []
    try:
        plain.generate_batch(asked[:1], 2)
        for count in (1, 1 + args.max_tokens):
            began = time.perf_counter()
            plain.generate_batch(asked, count)
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return None
    keys = sum(len(prompt) + args.max_tokens / 2 for prompt in prompts)
    step_ms = (seconds[1] - seconds[0]) / args.max_tokens * 1e3
    return GenerateSpeed(keys, step_ms, rows * (1 + args.max_tokens) / seconds[1])
