"""The forward pass of a micro-batch: tokens, positions, features and attention pattern.

If the vision tower is frozen, image features are cached across steps. Each image then goes through
the tower alone, so its features depend on nothing else: a resumed run with an empty cache computes
the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from msgspec.structs import replace as replace_fields
from torch import Tensor

from sightline.compute.attention import AttentionPattern, build_attention_pattern
from sightline.compute.attention_exact import ExactPattern
from sightline.compute.context_parallel import ContextPattern, divide, join_scores
from sightline.compute.feature_cache import FeatureCache, ItemFeatures
from sightline.errors import FamilyError, Misaligned
from sightline.families import Family, Forward
from sightline.families.device_copy import copy_to_device
from sightline.families.experts import ExpertRouting
from sightline.trainer.alignment_checks import check_features, check_patches
from sightline.trainer.feed import ReadyMicroBatch
from sightline.trainer.parallel_dims import ParallelDims
from sightline.trainer.shard import ShardedModel
from sightline.wire.micro_batch import MicroBatch


@dataclass
class FrozenTowerFeatures:
    forward: Forward
    cache: FeatureCache
    dims: ParallelDims = field(default_factory=ParallelDims)

    @torch.no_grad()
    def encode(
        self, ready: ReadyMicroBatch, device: torch.device
    ) -> Float[Tensor, "visual features"] | None:
        """Return the features of the distinct images, in order; None if this rank has none.

        Every rank must join the tower's collectives equally often, so a rank with cached features
        encodes the smallest image instead.
        """
        items, starts = ready.batch.items, ready.patch_starts
        features = {}
        for place, entry in enumerate(items if ready.has_stored_pixels else ()):
            if (known := self.cache.find(entry.item.key)) is not None:
                features[place] = known
        missing = [place for place in range(len(items)) if place not in features]
        # Before the first pass: from then on, ranks meet in the tower's collectives.
        passes = self.dims.max(len(missing)) if ready.runs_tower else len(missing)
        if missing:
            assert ready.made is not None
            patches = copy_to_device(ready.made, device)  # whole: see there
        for place in missing:
            entry = items[place]
            item_patches = patches[starts[place] : starts[place + 1]]
            encoded = self.forward.encode(item_patches, [entry.item.grid])
            features[place] = ItemFeatures(encoded, entry.pixel_digest or "")
            if ready.has_stored_pixels:
                self.cache.put(entry.item.key, features[place])
        for _ in range(passes - len(missing)):
            encode_blank(self.forward, device)
        return torch.cat([features[i].features for i in range(len(items))]) if items else None


@dataclass
class FrozenModel:
    """A model that scores tokens and never trains: the reference, or a teacher."""

    forward: Forward
    sharded: ShardedModel | None = None
    """Gathers the model's parameters around a call; None if they are not sharded."""
    features: FrozenTowerFeatures | None = None


def encode_blank(forward: Forward, device: torch.device) -> Float[Tensor, ""]:
    """Encode the smallest image, because the tower's collectives need every rank."""
    smallest = forward.blank_image()
    if smallest is None:
        problem = "another rank has images, but this rank has no vision tower"
        raise FamilyError(problem, "this is a bug. Report it")
    patches, grid = smallest
    return forward.encode(patches.to(device), [grid]).sum()


class ContextShare:
    """The tokens of a micro-batch that this rank computes: all of them without a group."""

    def __init__(self, batch: MicroBatch, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        num_tokens, self._num_trained = len(batch.token_ids), len(batch.trained)
        self.start, self.stop = 0, num_tokens
        if group is not None:
            self.start, self.stop = divide(num_tokens, group.size())[group.rank()]
        predicting = batch.parent.numpy()[batch.trained.numpy()].astype(np.int64)
        self.trained = np.flatnonzero(self.contains(predicting))
        """The trained tokens whose prediction this rank computes."""
        self.predicting = predicting[self.trained] - self.start
        """The places, among this rank's tokens, of the tokens that predict them."""

    def contains(self, places: Int[np.ndarray, " places"]) -> Bool[np.ndarray, " places"]:
        """Return which of the places in the micro-batch are this rank's."""
        return (self.start <= places) & (places < self.stop)

    def select_images(self, ready: ReadyMicroBatch) -> ReadyMicroBatch:
        """Return the micro-batch with only the images of this rank's tokens."""
        if self._group is None:
            return ready
        batch = ready.batch
        slots = [
            slot
            for slot in batch.slots
            if slot.offset < self.stop and self.start < slot.offset + slot.length
        ]
        item_numbers = sorted({slot.item for slot in slots})
        patches = ready.take_patches(item_numbers)
        items = [batch.items[at] for at in item_numbers]
        slots = [replace_fields(slot, item=item_numbers.index(slot.item)) for slot in slots]
        return replace(ready, batch=replace_fields(batch, items=items, slots=slots), made=patches)

    def divide_attention(self, pattern: AttentionPattern, num_tokens: int) -> AttentionPattern:
        return pattern if self._group is None else ContextPattern(pattern, self._group, num_tokens)

    def join(self, scores: Float[Tensor, " own"]) -> Float[Tensor, " tokens"]:
        """Return the scores of all trained tokens, from those of every rank."""
        if self._group is None:
            return scores
        places = copy_to_device(self.trained, scores.device)
        return join_scores(scores, places, self._num_trained, self._group)

    def sum(self, numbers: Tensor) -> Tensor:
        """Return numbers of this rank's tokens, summed over all tokens."""
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return numbers


def use_routes(
    forward: Forward, batch: MicroBatch, device: torch.device, replays: bool, share: ContextShare
) -> None:
    """Replay the sampler's routes in the next pass and its backward pass, or only compare them."""
    routing: ExpertRouting | None = getattr(forward, "routing", None)
    routes = None if batch.routes is None else batch.routes.numpy()[share.start : share.stop].copy()
    num_experts = 0 if routing is None else routing.num_experts
    if routes is not None:
        is_known = routes != np.iinfo(routes.dtype).max
        if ((routes < 0) | (routes >= num_experts))[is_known].any():
            raise Misaligned(
                f"step {batch.step}: a token has a route to expert {routes[is_known].max()}, and "
                f"the model has {num_experts} experts",
                "sample and train with the same checkpoint",
            )
    if routing is not None:
        routing.use(None if routes is None else copy_to_device(routes, device), replays)


def compute_hidden(
    forward: Forward,
    ready: ReadyMicroBatch,
    family: Family,
    device: torch.device,
    frozen: FrozenTowerFeatures | None = None,
    exact: bool = False,
    share: ContextShare | None = None,
) -> Float[Tensor, "own hidden"]:
    """Return the hidden states that predict this rank's share of the trained tokens, by default
    all.

    Each image is encoded once, or its features come from the cache of a `frozen` tower. The pixels
    must exist. `exact` is for a model that was loaded as exact.
    """
    share = share or ContextShare(ready.batch)
    check_patches(ready.batch, ready.made)
    ready = share.select_images(ready)
    batch, own = ready.batch, slice(share.start, share.stop)
    token_ids = copy_to_device(batch.token_ids.numpy()[own].astype(np.int64), device)[None]
    positions = copy_to_device(batch.positions.numpy()[:, own].astype(np.int64), device)[:, None]
    features = places = encoded = blank = None
    if frozen is not None:
        encoded = frozen.encode(ready, device)
    elif ready.made is not None:
        patches = copy_to_device(ready.made, device)
        encoded = forward.encode(patches, [entry.item.grid for entry in batch.items])
    elif ready.runs_tower:
        blank = encode_blank(forward, device)
    if encoded is not None:
        index, where = _locate_features(batch, family)
        check_features(batch, len(encoded), family)
        is_own = share.contains(where)
        features = encoded[copy_to_device(index[is_own], device)]
        places = copy_to_device(where[is_own] - share.start, device)
    dtype = next(forward.model.parameters()).dtype
    pattern: AttentionPattern
    if exact:  # exact models pack no trees
        ends = np.unique(batch.subtree_end.numpy())
        pattern = ExactPattern(np.diff(ends, prepend=0).tolist(), device, dtype)
    else:
        pattern = build_attention_pattern(batch.subtree_end.numpy(), device, dtype)
    pattern = share.divide_attention(pattern, len(batch.token_ids))
    hidden = forward.hidden(token_ids, positions, features, places, pattern)[0]
    if blank is not None:
        hidden = hidden + 0.0 * blank.to(hidden.dtype)
    return hidden[copy_to_device(share.predicting, device)]


def _locate_features(
    batch: MicroBatch, family: Family
) -> tuple[Int[np.ndarray, " visual"], Int[np.ndarray, " visual"]]:
    """Return the feature row and the place of each visual token, by ascending place."""
    offsets = [family.feature_offsets(entry.item) for entry in batch.items]
    firsts = np.cumsum([0, *map(len, offsets)])
    slots = sorted(batch.slots, key=lambda slot: slot.offset)
    index = np.concatenate([firsts[s.item] + np.arange(len(offsets[s.item])) for s in slots])
    where = np.concatenate([s.offset + offsets[s.item] for s in slots])
    return index.astype(np.int64), where.astype(np.int64)
