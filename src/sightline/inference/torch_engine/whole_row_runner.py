"""Models that attend in their own way, of which no key or value is kept: each token of a row is
computed together with all that stand before it."""

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
"""Tokens of a forward pass of several rows, with their padding."""


class WholeRowRunner(ModelRunner):
    """Used by the engine's thread alone."""

    keeps_kv = False

    def hidden(self, plan: StepPlan, running: dict[int, TorchRequest]) -> Hidden:
        """Hidden states of the plan's tokens."""
        done, places = [], []
        for part in group_rows(plan.ends):
            picked = plan.select(part)
            whole = replace(picked, starts=np.zeros_like(picked.starts), counts=picked.ends)
            hidden = self._forward(
                whole, running, PackedPattern(whole.counts.tolist(), self._device)
            )
            asked = _find_tokens(whole.offsets + picked.starts, picked.counts)
            done.append(hidden[self._copy(asked)])
            places.append(_find_tokens(plan.offsets[part], picked.counts))
        order = self._copy(np.argsort(np.concatenate(places)))
        return torch.cat(done)[order]


def group_rows(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of the rows of each forward pass: rows of like length, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, MAX_PADDED_TOKENS // int(lengths[order[start]]))
        yield order[start:end]
        start = end


def _find_tokens(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places of runs of tokens, one after the other."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)])
