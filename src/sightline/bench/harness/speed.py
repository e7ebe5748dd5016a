"""Times training steps and the same steps in plain transformers, and measures device limits.

A step's FLOPs are 6 per matrix element and multiplied row (2 forward, 4 backward), counted in
forward hooks. Attention counts 12 per token pair, head and head dimension, for the causal half.
Recomputed activations and embedding lookups do not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from sightline.compute.model import MODEL_DTYPES, pick_device
from sightline.config import ModelConfig, TrainerConfig
from sightline.families import Family
from sightline.families.device_copy import allocate_pinned
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import AllocatePatches

PEAK_SIDE = 8192
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}
NUM_PROFILED = 20


@dataclass(frozen=True, slots=True)
class Timings:
    seconds: list[float]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure_peak(device: str, dtype: str) -> float:
    """Return the FLOP/s of one large matrix product."""
    place = torch.device(pick_device(device))
    side = PEAK_SIDE if place.type == "cuda" else PEAK_SIDE // 8
    a, b = (torch.randn(side, side, device=place, dtype=MODEL_DTYPES[dtype]) for _ in range(2))
    times = measure_time(lambda: torch.mm(a, b), device, repeats=20, warm_up=5)
    return 2 * side**3 / times.median_s


def measure_copy_bandwidth(device: str) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.ones(COPY_BYTES[device] // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = measure_time(lambda: target.copy_(source), device, repeats=7, warm_up=1)
    return 2 * source.nbytes / times.median_s


def build_allocate(device_name: str) -> AllocatePatches:
    """Return the function with which the trainer allocates memory for patches."""
    return partial(allocate_pinned, device=torch.device(pick_device(device_name)))


def measure_time(work: Callable[[], Any], device_name: str, repeats: int, warm_up: int) -> Timings:
    device = torch.device(pick_device(device_name))
    is_cuda = device.type == "cuda"
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()  # frees the memory of the previous measurement
    for _ in range(warm_up):
        work()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return Timings(seconds, torch.cuda.max_memory_allocated(device) if is_cuda else 0)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile_step(step: Callable[[], Any], path: Path) -> str:
    """Write a Chrome trace of one step to `path` and return a table of its longest operations."""
    activities, sort_by = [ProfilerActivity.CPU], "self_cpu_time_total"
    if torch.cuda.is_available():
        activities, sort_by = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    with torch.profiler.profile(activities=activities) as profile:
        step()
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(path))
    return str(profile.key_averages().table(sort_by=sort_by, row_limit=NUM_PROFILED))


def step_flops(learner: Learner, batch: ReadyBatch) -> float:
    """Run one step and return its FLOPs."""
    counter = _FlopCounter()
    handles = [
        module.register_forward_hook(counter.count)
        for module in learner.forward.model.modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    learner.step(batch)
    for handle in handles:
        handle.remove()
    return counter.flops + attention_flops(learner, batch)


class _FlopCounter:
    def __init__(self) -> None:
        self.flops = 0.0

    def count(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        # Passes under `no_grad` do not train.
        if torch.is_grad_enabled():
            weight: Any = module.weight
            rows = output.numel() // weight.shape[0]
            self.flops += 6.0 * weight.numel() * rows


def attention_flops(learner: Learner, batch: ReadyBatch) -> float:
    config: Any = learner.forward.model.config
    text = config.get_text_config()
    vision_blocks = len(learner.forward.blocks()) - text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    width = text.num_attention_heads * getattr(text, "head_dim", 0)
    total = 0.0
    for ready in batch.micro_batches:
        packed = ready.batch
        ends = packed.subtree_end.numpy().astype(np.int64)
        total += 12.0 * layers * width * float((ends - np.arange(len(ends))).sum())
        patches = [int(np.prod(entry.item.grid)) for entry in packed.items]
        vision = getattr(config, "vision_config", None)
        if patches and vision is not None:
            total += 12.0 * vision_blocks * vision.hidden_size * float(sum(n * n for n in patches))
    return total


class PlainStep:
    """The same step with transformers alone: its model, padded rows, sdpa."""

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, family: Family, checkpointing: bool
    ) -> None:
        from transformers import AutoModelForImageTextToText

        self._device = torch.device(pick_device(trainer.device))
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            model.path, dtype=MODEL_DTYPES[model.dtype],
            attn_implementation="sdpa", local_files_only=True,
        ).to(self._device).train()  # fmt: skip
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._family: Any = family
        self._max_grad_norm = trainer.max_grad_norm
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=trainer.lr, fused=True)

    def inputs(self, batch: ReadyBatch, num_rows: int) -> list[dict[str, torch.Tensor]]:
        """Pad packs of one sample each into batches of `num_rows` rows."""
        chunks = [
            batch.micro_batches[at : at + num_rows]
            for at in range(0, len(batch.micro_batches), num_rows)
        ]
        return [self._pad(chunk) for chunk in chunks]

    def _pad(self, chunk: Sequence[Any]) -> dict[str, torch.Tensor]:
        packs = [ready.batch for ready in chunk]
        longest = max(len(pack.token_ids) for pack in packs)
        ids = torch.zeros(len(packs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        trained, advantages, old = [], [], []
        for i, pack in enumerate(packs):
            ids[i, : len(pack.token_ids)] = torch.from_numpy(pack.token_ids.numpy().copy()).long()
            mask[i, : len(pack.token_ids)] = 1
            trained.append(torch.from_numpy(pack.trained.numpy().astype(np.int64)) + i * longest)
            advantages.append(torch.from_numpy(pack.advantages.numpy().copy()))
            old.append(torch.from_numpy(pack.logprobs.numpy().copy()))
        pads = torch.isin(ids, torch.tensor(self._family.slot_token_ids))
        pixel_rows = [self._family.rows(ready.made) for ready in chunk]
        grids = [entry.item.grid for pack in packs for entry in pack.items]
        inputs = {
            "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": pads.int(),
            "pixel_values": torch.from_numpy(np.concatenate(pixel_rows)).to(self.model.dtype),
            "image_grid_thw": torch.tensor(grids), "trained": torch.cat(trained),
            "advantages": torch.cat(advantages), "old": torch.cat(old),
        }  # fmt: skip
        return {name: value.to(self._device) for name, value in inputs.items()}

    def step(self, batches: Sequence[dict[str, torch.Tensor]]) -> float:
        from sightline.algo.losses import LossInputs, ppo

        self._optimizer.zero_grad(set_to_none=True)
        num = sum(len(batch["trained"]) for batch in batches)
        for batch in batches:
            inputs = dict(batch)
            trained, advantages, old = (inputs.pop(k) for k in ("trained", "advantages", "old"))
            hidden = self.model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = self.model.lm_head(hidden[trained - 1]).float()
            chosen = inputs["input_ids"].flatten()[trained]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, chosen[:, None]).squeeze(-1)
            loss, _ = ppo(LossInputs(logprobs, old, advantages, torch.zeros_like(chosen)))
            (loss.sum() / num).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return float(norm)
