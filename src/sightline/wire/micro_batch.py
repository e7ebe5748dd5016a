"""What one forward pass uses: nodes laid side by side, each once, and who may see whom.

Letters: T tokens, S trained tokens, A position axes (1, or 3 for MRoPE).
A token q attends to k when k <= q < subtree_end[k].
"""

from __future__ import annotations

import msgspec
import numpy as np

from sightline.errors import Misaligned
from sightline.wire.array import Array
from sightline.wire.item import MediaItem

MICRO_BATCH_SCHEMA = 1


class PackedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distinct image of the micro-batch."""

    item: MediaItem
    pixel_digest: str | None
    wanted_by: str
    """The first trace that shows it, for error messages."""


class PackedSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: int
    length: int
    item: int


class TokenOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trained tokens [start, stop), counted among the trained, come from this node."""

    trace_id: str
    node: int
    start: int
    stop: int


class MicroBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    token_ids: Array
    """int32 (T,)."""
    positions: Array
    """int32 (A, T)."""
    subtree_end: Array
    """int32 (T,)."""
    parent: Array
    """int32 (T,): the index whose hidden state predicts the token, -1 for none."""
    trained: Array
    """int32 (S,): indices of the tokens that train, in the order of `origins`. One that several
    rollouts sampled stands there for each of them."""
    logprobs: Array
    """float32 (S,), by the sampler."""
    advantages: Array
    """float32 (S,)."""
    loss_weight: Array
    """float32 (S,); over all micro-batches of a step they add up to 1."""
    versions: Array
    """int32 (S,)."""
    items: list[PackedItem]
    slots: list[PackedSlot]
    origins: list[TokenOrigin]
    temperature: float = 1.0
    schema: int = MICRO_BATCH_SCHEMA

    def __post_init__(self) -> None:
        num_tokens, num_trained = len(self.token_ids), len(self.trained)
        wrong = [
            name
            for name, size in (
                ("positions", self.positions.shape[-1]),
                ("subtree_end", len(self.subtree_end)),
                ("parent", len(self.parent)),
            )
            if size != num_tokens
        ]
        wrong += [
            name
            for name in ("logprobs", "advantages", "loss_weight", "versions")
            if len(getattr(self, name)) != num_trained
        ]
        if wrong:
            raise Misaligned(
                f"micro-batch of step {self.step}: {', '.join(wrong)} do not line up with "
                f"{num_tokens} tokens, {num_trained} trained",
                "this is a bug of the packer; keep batches/ and report it",
            )
        if num_trained and int(self.parent.numpy()[self.trained.numpy()].min()) < 0:
            raise Misaligned(
                f"micro-batch of step {self.step}: a trained token has no parent",
                "the first token of a sequence cannot train",
            )

    @property
    def num_patches(self) -> int:
        return sum(int(np.prod(packed.item.grid)) for packed in self.items)
