"""Masks ids that must not be sampled: the pads of images, and ids that a request bans."""

from __future__ import annotations

from typing import Any

import torch

from sightline.inference.vllm_plugin import BANNED_IDS_KEY, CONFIG_KEY, end_with_parent
from sightline.inference.vllm_plugin.symbols import LogitsProcessor, process_dict_updates


class BannedIdsProcessor(LogitsProcessor):
    """Masks ids before temperature and filters, as the trainer does."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end_with_parent()
        banned = vllm_config.additional_config[CONFIG_KEY]["banned"]
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)
        self._own: dict[int, list[int]] = {}
        """Ids that a request bans in addition, by its row of the batch."""
        self._rows = self._ids = self._banned[:0]

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if process_dict_updates(self._own, batch_update, _find_banned_ids):
            pairs = [(row, token) for row, ids in self._own.items() for token in ids]
            places = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).to(self._banned.device)
            self._rows, self._ids = places.unbind(-1)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits.index_fill_(-1, self._banned, float("-inf"))
        if self._own:
            logits[self._rows, self._ids] = float("-inf")
        return logits


def _find_banned_ids(params: Any, prompt: Any, output: Any) -> list[int] | None:
    return (params.extra_args or {}).get(BANNED_IDS_KEY)
