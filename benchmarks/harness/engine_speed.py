"""The embedded engine's speed in this process, compared with the limits of the device.

A decoding step must at least read the language model's weights, and the keys and values of all
rows, once. The memory bandwidth is that of a copy, measured in the same run.

A prompt's FLOPs are a third of those that the trainer counts for it: 2 per matrix element and
multiplied row, and 4 per attended token pair and attention width. The output matrix counts for the
last token only.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sightline.bench.harness.speed import measure_peak, measure_time
from sightline.bench.harness.workspace import draw_noise
from sightline.compute.model import pick_device
from sightline.families import Forward, load_family, load_renderer
from sightline.inference.engine import EngineRequest
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaStore
from sightline.message import user
from sightline.pack import MicroBatchWork
from sightline.pixels import Materializer
from sightline.render import Rendered
from sightline.trainer.distribute import estimate_price
from sightline.wire import Slot
from sightline.wire.generate import SamplingParams

PREFILL_CHUNK = 2048
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}


@dataclass(frozen=True)
class DecodeSpeed:
    """The speed of the engine's pure decoding steps, while no row is idle."""

    rows: float
    """Mean number of rows that decode in a step."""
    keys: float
    """Tokens whose keys and values a step reads."""
    step_ms: float
    tokens_per_s: float
    """Sampled tokens per second of the whole run, prompts included."""
    weight_bytes: int
    key_bytes: int
    """Size of one token's keys and values."""
    bandwidth: float

    @property
    def read_bytes(self) -> float:
        """Bytes of weights, keys and values that a step reads."""
        return self.weight_bytes + self.keys * self.key_bytes

    @property
    def share(self) -> float:
        """The share of a step's time needed to read its bytes at the bandwidth."""
        return self.read_bytes / self.bandwidth * 1e3 / self.step_ms


def draw_prompts(rows: int, args: argparse.Namespace, ids: range) -> list[list[int]]:
    """Draw prompts of mixed lengths, 1.5 times as many as rows, so that rows leave and join."""
    rng = random.Random(rows)
    low, high = args.lengths
    sizes = [rng.randint(low, high - args.max_tokens) for _ in range(rows + rows // 2)]
    return [rng.choices(ids, k=size) for size in sizes]


def build_bench_spec(args: argparse.Namespace, media: Path, **values: Any) -> ServerSpec:
    """Build the spec of an engine without prefix caching."""
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
    # Answers differ in length too, so that rows do not end together.
    counts = [args.max_tokens - (i % 4) * (args.max_tokens // 8) for i in range(len(prompts))]
    weights = count_read_bytes(engine.runner.forward)
    done: queue.SimpleQueue[list[EngineRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    after: dict[str, float] = {}
    try:
        for _ in range(2):  # the first pass warms up all shapes
            before, began = engine.totals(), time.perf_counter()
            engine.submit(
                [
                    _build_request(i, *both)
                    for i, both in enumerate(zip(prompts, counts, strict=True))
                ]
            )
            left = len(prompts)
            after.clear()
            while left:
                left -= _take_finished(done)
                if left <= rows and not after:  # no prompt waits, so rows become idle
                    after.update(engine.totals())
            seconds, sampled = time.perf_counter() - began, engine.totals()["sampled_tokens"]
    finally:
        engine.stop()
        engine.join(60)
    busy_seconds = {name: after[name] - before[name] for name in after}
    steps = max(busy_seconds["decode_steps"], 1)
    return DecodeSpeed(
        rows=busy_seconds["decode_tokens"] / steps,
        keys=busy_seconds["decode_keys"] / steps,
        step_ms=busy_seconds["decode_seconds"] / steps * 1e3,
        tokens_per_s=(sampled - before["sampled_tokens"]) / seconds,
        weight_bytes=weights,
        key_bytes=engine.runner.kv.token_bytes,
        bandwidth=bandwidth,
    )


def _take_finished(done: queue.SimpleQueue[list[EngineRequest]]) -> int:
    """Wait for requests to finish, and return their number. Raise if one failed."""
    finished = done.get()
    for error in filter(None, (request.error for request in finished)):
        raise error
    return len(finished)


def _build_request(
    index: int, prompt: Sequence[int], max_tokens: int, slots: Sequence[Slot] = ()
) -> TorchRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
    ids, keys = np.array(prompt, dtype=np.int32), [slot.item.key for slot in slots]
    return TorchRequest(ids, list(slots), keys, params, seed=index)


def measure_copy_bandwidth(device: str) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(COPY_BYTES[device] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = measure_time(lambda: target.copy_(source), device, repeats=7, warm_up=1)
    return 2 * source.nbytes / times.median_s


def count_read_bytes(forward: Forward) -> int:
    """Return the bytes of weights that a decoding step reads, without the vision tower and
    without input embeddings that are not tied to the output."""
    model: Any = forward.model
    tower = {id(p) for _, p in forward.vision_parameters()}
    looked_up = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is looked_up:
        looked_up = None
    parameters = [p for p in model.parameters() if id(p) not in tower and p is not looked_up]
    return sum(p.nbytes for p in parameters)


WIDTH, HEIGHT = 640, 480
MAX_LEN = 4096
PIXEL_CACHE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class PromptSpeed:
    """The speed of prompts that are sent at once, with one answer token each."""

    tokens: int
    seconds: list[float]
    tower_seconds: float
    """Seconds of the vision tower in the last repeat."""
    flops: float
    tower_flops: float
    peak: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """The speed as a fraction of the matrix peak."""
        return self.flops / self.median_s / self.peak


def measure_prompts(
    args: argparse.Namespace, count: int, media: Path, exact: bool = False
) -> PromptSpeed:
    device = pick_device(args.device)
    peak = measure_peak(device, args.dtype)
    family, store = load_family(args.model), MediaStore(media)
    renderer = load_renderer(args.model, store, family)
    prompts = []
    for i in range(count):  # each image is different
        rng = random.Random(i)
        sides = (max(32, int(side * args.scale)) for side in (WIDTH, HEIGHT))
        text = "".join(rng.choices("abcdefgh ", k=64))
        prompts.append(renderer.render([user(store.put(draw_noise(rng, *sides)), text)]))
    spec = build_bench_spec(
        args,
        media,
        exact=exact,
        max_num_seqs=count,
        max_model_len=MAX_LEN,
        feature_cache_mb=0,
    )
    pixels = Materializer(family, store, PIXEL_CACHE_BYTES)
    engine = build_engine(spec, family, pixels, renderer.pad_token_ids)
    price, works = estimate_price(engine.runner.forward), list(map(_measure_work, prompts))
    tower = [replace(work, tokens=0, attended=0, trained=0) for work in works]
    done: queue.SimpleQueue[list[EngineRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    seconds, tower_s = [], 0.0
    try:
        for repeat in range(args.repeats + 2):  # the first makes pixels; two warm up
            before, began = engine.totals(), time.perf_counter()
            engine.submit(
                [_build_request(i, p.token_ids, 1, p.slots) for i, p in enumerate(prompts)]
            )
            left = count
            while left:
                left -= _take_finished(done)
            if repeat > 1:
                seconds.append(time.perf_counter() - began)
            time.sleep(0.01)  # the engine updates its totals at the end of a turn
            tower_s = engine.totals()["busy_vision_seconds"] - before["busy_vision_seconds"]
    finally:
        engine.stop()
        engine.join(60)
    return PromptSpeed(
        tokens=sum(len(p.token_ids) for p in prompts),
        seconds=seconds,
        tower_seconds=tower_s,
        flops=sum(map(price.of, works)) / 3,
        tower_flops=sum(map(price.of, tower)) / 3,
        peak=peak,
    )


def _measure_work(prompt: Rendered) -> MicroBatchWork:
    num, patches = len(prompt.token_ids), [slot.item.num_patches for slot in prompt.slots]
    return MicroBatchWork(
        tokens=num,
        attended=num * (num + 1) // 2,
        trained=1,
        patches=sum(patches),
        attended_patches=sum(size * size for size in patches),
    )
