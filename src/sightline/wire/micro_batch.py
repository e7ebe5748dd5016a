"""The input of one forward pass, with its attention pattern, and the scores of a step.

Dimensions: T tokens, S trained tokens, A position axes (1, or 3 for MRoPE).
A token q attends to k if k <= q < subtree_end[k].
"""

from __future__ import annotations

import msgspec
import numpy as np

from sightline.errors import Misaligned
from sightline.wire.array import Array
from sightline.wire.codec import Codec
from sightline.wire.item import MediaItem, Slot
from sightline.wire.sample import Segment


class PackedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distinct item of the micro-batch."""

    item: MediaItem
    pixel_digest: str | None
    """Digest of the sampler's pixels; None if its engine does not report them."""
    wanted_by: str
    """The first trace that contains the item, for error messages."""


class TokenOrigin(Segment, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The node that sampled the trained tokens [start, stop), counted among the trained ones."""

    trace_id: str
    group_id: str = ""
    sample: int = 0
    """The sample's place in the micro-batch."""


PER_TRAINED = ("logprobs", "advantages", "loss_weight", "versions", "teacher_logprobs")
"""Arrays of a micro-batch with one number per trained token. The last may be None."""


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
    """int32 (S,): indices of the trained tokens, in the order of `origins`. A token that several
    rollouts sampled occurs once for each."""
    logprobs: Array
    """float32 (S,), the sampler's logprobs of the trained tokens."""
    advantages: Array
    """float32 (S,)."""
    loss_weight: Array
    """float32 (S,), the loss weight of each token. Over all micro-batches of a step the weights
    sum to 1, unless [algorithm] aggregation has its own divisor."""
    versions: Array
    """int32 (S,), the policy versions that sampled the trained tokens."""
    items: list[PackedItem]
    slots: list[Slot[int]]
    """Slots whose item is an index into `items`."""
    origins: list[TokenOrigin]
    temperature: float = 1.0
    routes: Array | None = None
    """(T, layers, experts per token): the sampler's experts of each token, as in `Sample`."""
    teacher_logprobs: Array | None = None
    """float32 (S,), if a server computed them."""

    def __post_init__(self) -> None:
        num_tokens, num_trained = len(self.token_ids), len(self.trained)
        lengths = dict.fromkeys(("positions", "subtree_end", "parent"), num_tokens)
        lengths |= {name: num_trained for name in PER_TRAINED if getattr(self, name) is not None}
        wrong = [name for name, num in lengths.items() if getattr(self, name).shape[-1:] != (num,)]
        if self.routes is not None and self.routes.shape[:-2] != (num_tokens,):
            wrong.append("routes")
        if wrong:
            raise Misaligned(
                f"micro-batch of step {self.step}: {', '.join(wrong)} do not line up with "
                f"{num_tokens} tokens, {num_trained} trained",
                "this is a bug in the packer. Keep batches/ and report it",
            )
        if num_trained and int(self.parent.numpy()[self.trained.numpy()].min()) < 0:
            raise Misaligned(
                f"micro-batch of step {self.step}: a trained token has no parent",
                "the first token of a sequence cannot train",
            )

    def take_trained(self, kept: np.ndarray) -> dict[str, Array]:
        """Return the arrays of the trained tokens that `kept` selects."""
        arrays = {name: getattr(self, name) for name in PER_TRAINED}
        return {k: Array.of(a.numpy()[kept], a.dtype) for k, a in arrays.items() if a is not None}

    @property
    def num_patches(self) -> int:
        return sum(packed.item.num_patches for packed in self.items)


class StepScores(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer's scores of one step's tokens, by trace and node."""

    step: int
    origins: list[TokenOrigin]
    """The nodes whose tokens are at [start, stop) of the arrays."""
    logprobs: Array
    """float32, the trainer's logprobs before the update."""
    ratios: Array
    """float32, importance ratios of trainer to sampler."""
    advantages: Array
    """float32."""

    def __post_init__(self) -> None:
        shapes = {array.shape for array in (self.logprobs, self.ratios, self.advantages)}
        size = self.logprobs.shape[0] if self.logprobs.shape else 0
        is_inside = all(0 <= o.start <= o.stop <= size and o.node >= 0 for o in self.origins)
        if shapes != {(size,)} or not is_inside:
            raise Misaligned(
                f"scores of step {self.step}: arrays of {sorted(shapes)} do not line up with their "
                "nodes",
                "the file is damaged. Remove it, because the run does not need it",
            )

    def to_bytes(self) -> bytes:
        return _codec.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepScores:
        return _codec.decode(data)


_codec = Codec(StepScores, "the scores of a step")
