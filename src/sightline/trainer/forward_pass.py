"""A ready micro-batch through the model: tokens, positions, features and attention pattern."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightline.compute.attention import build_attention_pattern
from sightline.families import Family, Forward
from sightline.families.device_copy import copy_to_device
from sightline.trainer.alignment_checks import check_features, check_patches
from sightline.trainer.features import FrozenTowerFeatures, encode_blank
from sightline.trainer.feed import ReadyMicroBatch
from sightline.wire.micro_batch import MicroBatch


def compute_hidden(
    forward: Forward,
    ready: ReadyMicroBatch,
    family: Family,
    device: torch.device,
    frozen: FrozenTowerFeatures | None = None,
) -> Float[Tensor, "trained hidden"]:
    """The hidden states that predict the trained tokens.

    Each image is encoded once, or its features come from the cache of a `frozen` tower.
    """
    batch = ready.batch
    token_ids = copy_to_device(batch.token_ids.numpy().astype(np.int64), device)[None]
    positions = copy_to_device(batch.positions.numpy().astype(np.int64), device)[:, None]
    features = places = encoded = blank = None
    check_patches(batch, ready.patches)
    if frozen is not None:
        encoded = frozen.encode(ready, device)
    elif ready.patches is not None:
        patches = copy_to_device(ready.patches, device)
        encoded = forward.encode(patches, [entry.item.grid for entry in batch.items])
    elif ready.runs_tower:
        blank = encode_blank(forward, device)
    if encoded is not None:
        index, where = _locate_features(batch, family)
        check_features(batch, len(encoded), family)
        features = encoded[copy_to_device(index, device)]
        places = copy_to_device(where, device)
    dtype = next(forward.model.parameters()).dtype
    pattern = build_attention_pattern(batch.subtree_end.numpy(), device, dtype)
    hidden = forward.hidden(token_ids, positions, features, places, pattern)[0]
    if blank is not None:
        hidden = hidden + 0.0 * blank.to(hidden.dtype)
    predicting = batch.parent.numpy()[batch.trained.numpy()].astype(np.int64)
    return hidden[copy_to_device(predicting, device)]


def _locate_features(
    batch: MicroBatch, family: Family
) -> tuple[Int[np.ndarray, " visual"], Int[np.ndarray, " visual"]]:
    """For each visual token of the pack the row of its feature, and its place, ascending."""
    counts = [family.num_tokens(entry.item) for entry in batch.items]
    firsts = np.cumsum([0, *counts])
    slots = sorted(batch.slots, key=lambda slot: slot.offset)
    index = np.concatenate([firsts[s.item] + np.arange(s.length) for s in slots])
    where = np.concatenate([s.offset + np.arange(s.length) for s in slots])
    return index.astype(np.int64), where.astype(np.int64)
