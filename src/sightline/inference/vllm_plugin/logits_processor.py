"""A logits processor that prevents vLLM from sampling image pads."""

from __future__ import annotations

from typing import Any

import torch

from sightline.inference.vllm_plugin import CONFIG_KEY, end_with_parent
from sightline.inference.vllm_plugin.symbols import LogitsProcessor


class BannedIdsProcessor(LogitsProcessor):
    """Masks banned ids before temperature and filters, as the trainer does."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end_with_parent()
        banned = vllm_config.additional_config[CONFIG_KEY]["banned"]
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: all requests have the same banned ids."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, self._banned, float("-inf"))
