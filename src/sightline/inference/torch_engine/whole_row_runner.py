"""Runs models with attention of their own, which cannot use our KV cache: each step computes whole
rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from sightline.compute.attention import PackedPattern
from sightline.compute.logprobs import Hidden
from sightline.inference.torch_engine.model_runner import ModelRunner
from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.step_plan import StepPlan

MAX_PADDED_TOKENS = 16384
"""Maximum number of tokens, with padding, in a forward pass of several rows."""


class WholeRowRunner(ModelRunner):
    """Used only by the engine's thread."""

    keeps_kv = False

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Return the hidden states of the plan's tokens."""
        done, places = [], []
        for part in group_rows(plan.ends):
            picked = plan.select(part)
            whole = replace(picked, starts=np.zeros_like(picked.starts), counts=picked.ends)
            hidden = self._forward(
                whole, running, PackedPattern(whole.counts.tolist(), self._device)
            )
            new_tokens = _find_tokens(whole.offsets + picked.starts, picked.counts)
            done.append(hidden[self._copy(new_tokens)])
            places.append(_find_tokens(plan.offsets[part], picked.counts))
        order = self._copy(np.argsort(np.concatenate(places)))
        return torch.cat(done)[order]


def group_rows(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of each forward pass: rows of similar length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, MAX_PADDED_TOKENS // int(lengths[order[start]]))
        yield order[start:end]
        start = end


def _find_tokens(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the positions of several runs of tokens."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
