"""Prompts with images in the embedded engine against the matrix peak, in this process.

FLOPs of a prompt: 2 for every number of every matrix and every row that it is multiplied with, and
4 for every pair of attention that sees one another, every head and every number of a head. The
tower's matrices are counted where the rows pass; the output's is applied to the last token alone.
Models with experts are refused: which of them a row passes is not known beforehand.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness.decode_speed import build_bench_spec
from sightline.bench.harness.speed import measure_peak
from sightline.bench.harness.workspace import draw_noise
from sightline.compute.model import pick_device
from sightline.errors import ConfigError
from sightline.families import Forward, load_family, load_renderer
from sightline.inference.engine import EngineRequest
from sightline.inference.torch_engine.build import build_engine
from sightline.inference.torch_engine.row_table import TorchRequest
from sightline.media import MediaStore
from sightline.message import user
from sightline.pixels import Materializer
from sightline.render import Rendered
from sightline.wire.generate import SamplingParams

WIDTH, HEIGHT = 640, 480
MAX_LEN = 4096
PIXEL_CACHE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class PromptSpeed:
    """The speed of prompts that are sent at once and answered by one token each."""

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
        """The speed as a share of the matrix peak."""
        return self.flops / self.median_s / self.peak


def measure_prompts(
    args: argparse.Namespace, count: int, media: Path, exact: bool = False
) -> PromptSpeed:
    device = pick_device(args.device)
    peak = measure_peak(device, args.dtype)
    family, store = load_family(args.model), MediaStore(media)
    renderer = load_renderer(args.model, store, family)
    prompts = []
    for i in range(count):  # every image another one
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
    text_flops = _count_text_flops(engine.runner.forward, [len(p.token_ids) for p in prompts])
    tower = _count_tower_flops(engine.runner.forward, pixels, prompts[0])
    done: queue.SimpleQueue[list[EngineRequest]] = queue.SimpleQueue()
    engine.start(done.put)
    seconds, tower_s = [], 0.0
    try:
        for repeat in range(args.repeats + 2):  # the first makes pixels, both warm up
            before, began = engine.totals(), time.perf_counter()
            engine.submit([_build_request(i, one) for i, one in enumerate(prompts)])
            left = count
            while left:
                finished = done.get()
                left -= len(finished)
                for error in filter(None, (request.error for request in finished)):
                    raise error
            if repeat > 1:
                seconds.append(time.perf_counter() - began)
            time.sleep(0.01)  # the engine counts a turn when it is over
            tower_s = engine.totals()["busy_vision_seconds"] - before["busy_vision_seconds"]
    finally:
        engine.stop()
        engine.join(60)
    return PromptSpeed(
        tokens=sum(len(p.token_ids) for p in prompts),
        seconds=seconds,
        tower_seconds=tower_s,
        flops=text_flops + count * tower,
        tower_flops=count * tower,
        peak=peak,
    )


def _build_request(index: int, prompt: Rendered) -> TorchRequest:
    ids = np.array(prompt.token_ids, dtype=np.int32)
    keys = [slot.item.key for slot in prompt.slots]
    params = SamplingParams(max_tokens=1, temperature=1.0)
    return TorchRequest(ids, list(prompt.slots), keys, params, seed=index)


def _count_tower_flops(forward: Forward, pixels: Materializer, prompt: Rendered) -> float:
    """Count the operations of encoding the prompt's image."""
    model: Any = forward.model
    names = {name.rsplit(".", 1)[0] for name, _ in forward.vision_parameters()}
    total = 0.0

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        weight: Any = module.weight
        total += 2.0 * weight.numel() * (output.numel() // weight.shape[0])

    handles = [
        module.register_forward_hook(count)
        for name, module in model.named_modules()
        if name in names and isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    (slot,) = prompt.slots
    patches = torch.from_numpy(pixels.submit(slot.item).result().patches.copy())
    parameter = next(model.parameters())
    with torch.inference_mode():
        forward.encode(patches.to(parameter.device), [slot.item.grid])
    for handle in handles:
        handle.remove()
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return total
    blocks = len(forward.blocks()) - model.config.get_text_config().num_hidden_layers
    return total + 4.0 * blocks * vision.hidden_size * float(np.prod(slot.item.grid)) ** 2


def _count_text_flops(forward: Forward, lengths: list[int]) -> float:
    model: Any = forward.model
    tower = {id(parameter) for _, parameter in forward.vision_parameters()}
    output, text = model.get_output_embeddings().weight, model.config.get_text_config()
    looked_up = model.get_input_embeddings().weight
    matrices = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in tower or parameter is output or parameter is looked_up:
            continue
        if parameter.ndim > 2:
            raise ConfigError(
                f"--prompts, and {name} is no matrix that every token passes",
                "choose a model without experts that attends in every layer",
            )
        matrices += parameter.numel() if parameter.ndim == 2 else 0
    width = text.num_attention_heads * getattr(text, "head_dim", 0)
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    attention = 4.0 * text.num_hidden_layers * width * pairs
    return 2.0 * (matrices * sum(lengths) + output.numel() * len(lengths)) + attention
