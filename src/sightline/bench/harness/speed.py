"""What a training step costs, measured: whole steps of the learner, and plain transformers beside.

FLOPs of a step: 6 for every number of every matrix and every row that it is multiplied with (2
forward, 4 backward), counted where the rows pass; attention 12 for every pair that sees one
another, every head and every number of a head, the causal half of it. What is computed again in
the backward pass does not count. Embeddings are looked up, not multiplied.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from sightline.compute.model import MODEL_DTYPES, pick_device
from sightline.families import Family
from sightline.families.device_copy import allocate_pinned
from sightline.trainer.feed import ReadyBatch
from sightline.trainer.learner import Learner
from sightline.trainer.micro_batch_pixels import AllocatePatches

PEAK_SIDE = 8192


@dataclass(frozen=True, slots=True)
class Timings:
    seconds: list[float]
    peak_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure_peak(device: str, dtype: str, side: int = 0) -> float:
    """FLOP/s of one large product of matrices."""
    place = torch.device(pick_device(device))
    side = side or (PEAK_SIDE if place.type == "cuda" else PEAK_SIDE // 8)
    a, b = (torch.randn(side, side, device=place, dtype=MODEL_DTYPES[dtype]) for _ in range(2))
    times = measure_time(lambda: torch.mm(a, b), device, repeats=20, warm_up=5)
    return 2 * side**3 / times.median_s


def build_allocate(device_name: str) -> AllocatePatches:
    """A function that allocates memory of the kind that the trainer has for patches."""
    return partial(allocate_pinned, device=torch.device(pick_device(device_name)))


def measure_time(work: Callable[[], Any], device_name: str, repeats: int, warm_up: int) -> Timings:
    device = torch.device(pick_device(device_name))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the last measurement held
    for _ in range(warm_up):
        work()
    is_cuda = device.type == "cuda"
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


def step_flops(learner: Learner, batch: ReadyBatch) -> float:
    """FLOPs of one step, counted while one is run."""
    rows = _FlopCounter()
    handles = [
        module.register_forward_hook(rows.count)
        for module in learner.forward.model.modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    learner.step(batch)
    for handle in handles:
        handle.remove()
    return rows.flops + attention_flops(learner, batch)


class _FlopCounter:
    def __init__(self) -> None:
        self.flops = 0.0

    def count(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        # Under `no_grad` nothing is trained: a width that was asked for, a reference.
        if torch.is_grad_enabled():
            weight: Any = module.weight
            rows = output.numel() // weight.shape[0]
            self.flops += 6.0 * weight.numel() * rows


def attention_flops(learner: Learner, batch: ReadyBatch) -> float:
    config: Any = learner.forward.model.config
    text = config.get_text_config()
    blocks = len(learner.forward.blocks()) - text.num_hidden_layers
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
            total += 12.0 * blocks * vision.hidden_size * float(sum(n * n for n in patches))
    return total


class PlainStep:
    """The same step as people write it with transformers: its model, padded rows, sdpa."""

    def __init__(
        self, learner_like: Learner, path: str, family: Family, checkpointing: bool
    ) -> None:
        from transformers import AutoModelForImageTextToText

        device = learner_like.device
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=next(learner_like.forward.model.parameters()).dtype,
            attn_implementation="sdpa", local_files_only=True,
        ).to(device).train()  # fmt: skip
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._family: Any = family
        self._config = learner_like.config
        self._device = device
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def inputs(self, batch: ReadyBatch, rows_at_once: int) -> list[dict[str, torch.Tensor]]:
        """The rows of flat packs of one sample each, so many at once; all of one length."""
        chunks = [
            batch.micro_batches[at : at + rows_at_once]
            for at in range(0, len(batch.micro_batches), rows_at_once)
        ]
        return [self._padded(chunk) for chunk in chunks]

    def _padded(self, chunk: Sequence[Any]) -> dict[str, torch.Tensor]:
        packs = [ready.batch for ready in chunk]
        longest = max(len(pack.token_ids) for pack in packs)
        ids = torch.zeros(len(packs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        places, advantages, old = [], [], []
        for i, pack in enumerate(packs):
            ids[i, : len(pack.token_ids)] = torch.from_numpy(pack.token_ids.numpy().copy()).long()
            mask[i, : len(pack.token_ids)] = 1
            places.append(torch.from_numpy(pack.trained.numpy().astype(np.int64)) + i * longest)
            advantages.append(torch.from_numpy(pack.advantages.numpy().copy()))
            old.append(torch.from_numpy(pack.logprobs.numpy().copy()))
        pads = torch.isin(ids, torch.tensor(self._family.slot_token_ids))
        rows = [self._family.rows(ready.made) for ready in chunk]
        grids = [entry.item.grid for pack in packs for entry in pack.items]
        given = {
            "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": pads.int(),
            "pixel_values": torch.from_numpy(np.concatenate(rows)).to(self.model.dtype),
            "image_grid_thw": torch.tensor(grids), "trained": torch.cat(places),
            "advantages": torch.cat(advantages), "old": torch.cat(old),
        }  # fmt: skip
        return {name: value.to(self._device) for name, value in given.items()}

    def step(self, inputs: Sequence[dict[str, torch.Tensor]]) -> float:
        from sightline.algo.losses import LossInputs, ppo

        self._optimizer.zero_grad(set_to_none=True)
        num = sum(len(given["trained"]) for given in inputs)
        for given in inputs:
            given = dict(given)
            trained, advantages, old = (given.pop(k) for k in ("trained", "advantages", "old"))
            hidden = self.model.model(**given, use_cache=False).last_hidden_state.flatten(0, 1)
            logits = self.model.lm_head(hidden[trained - 1]).float()
            chosen = given["input_ids"].flatten()[trained]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, chosen[:, None]).squeeze(-1)
            loss, _ = ppo(LossInputs(logprobs, old, advantages, torch.zeros_like(chosen)))
            (loss.sum() / num).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        return float(norm)
