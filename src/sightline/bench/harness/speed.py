"""Times training steps and the same steps in plain transformers, and measures device limits.

A step's FLOPs are 6 per matrix element and multiplied row (2 forward, 4 backward), and 12 per
attended token pair and attention width. Recomputed activations and embedding lookups do not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity

from sightline.compute.model import MODEL_DTYPES, pick_device
from sightline.config import ModelConfig, TrainerConfig
from sightline.families import Family, Forward
from sightline.pack import MicroBatchWork
from sightline.trainer.distribute import estimate_price
from sightline.trainer.feed import ReadyBatch

PEAK_SIDE = 8192
COPIED_BYTES = 4 << 30
"""Bytes of the copy on a GPU, far more than its caches hold. A CPU copies a sixteenth."""
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


def measure_bandwidth(device: str) -> float:
    """Return the bytes per second of one large copy, read and written."""
    place = torch.device(pick_device(device))
    source = torch.ones(COPIED_BYTES // (1 if place.type == "cuda" else 16) // 4, device=place)
    target = torch.empty_like(source)
    times = measure_time(lambda: target.copy_(source), device, repeats=20, warm_up=5)
    return 2 * source.nbytes / times.median_s


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


def step_flops(forward: Forward, batch: ReadyBatch) -> float:
    """Return a step's FLOPs, counted as when the trainer balances its ranks."""
    price = estimate_price(forward)
    return sum(price.of(MicroBatchWork.of(ready.batch)) for ready in batch.micro_batches)


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
        rows = [torch.from_numpy(pack.token_ids.numpy().astype(np.int64)) for pack in packs]
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        trained, advantages, old = [], [], []
        for i, pack in enumerate(packs):
            places = torch.from_numpy(pack.trained.numpy().astype(np.int64))
            trained.append(places + i * ids.shape[1])
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
