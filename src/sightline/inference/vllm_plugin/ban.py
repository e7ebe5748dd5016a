"""Keeps pads out of what is sampled, for every request: a policy cannot say an image."""

from __future__ import annotations

from typing import Any

import torch

from sightline.inference.vllm_plugin import CONFIG
from sightline.inference.vllm_plugin.child import end_with_parent
from sightline.inference.vllm_plugin.symbols import LogitsProcessor


class BanIds(LogitsProcessor):
    """Before the temperature and the cuts, as the trainer leaves the same ids out."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end_with_parent()
        banned = vllm_config.additional_config[CONFIG]["banned"]
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """The same ids for every request."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, self._banned, float("-inf"))
