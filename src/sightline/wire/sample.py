"""Trainable branches of rollouts, and the batch of them that one optimizer step uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from sightline.errors import Misaligned
from sightline.wire.array import Array
from sightline.wire.codec import Codec, check_schema
from sightline.wire.item import MediaItem, Slot, Span, check_slots

SAMPLE_SCHEMA = 5
"""Schema 1 had advantages in every sample, and neither turns nor rewards per turn. Schema 2 had no
routes, schema 3 no teacher_logprobs, and schema 4 no turn_origins."""
OLDEST_SCHEMA = 1


class Segment(Span, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The trained tokens [start, stop) of a sample. Node `node` of its trace sampled them."""

    node: int
    turn: int = 0
    """The turn of the rollout that sampled the tokens, counted from 0."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace_id: str
    group_id: str
    env: str
    reward: float
    token_ids: Array
    """int32, the tokens of the branch from its root."""
    trained: Array
    """int32, the indices of the tokens that train, ascending, never 0."""
    logprobs: Array
    """float32, the sampler's logprob of each trained token."""
    versions: Array
    """int32, the policy version that sampled each trained token."""
    segments: list[Segment]
    items: list[MediaItem]
    slots: list[Slot[int]]
    """Slots whose item is an index into `items`."""
    advantages: Array | None = None
    """float32, the advantage of each trained token. None in the batches of `sightline rl`, whose
    trainer computes them. Batches of schema 1 store them."""
    turn_rewards: list[float] | None = None
    """The reward of every turn of the rollout; None if the environment gives none."""
    turn_origins: list[tuple[int, int]] | None = None
    """For every turn, the node of its prompt and the turn that it continues, or -1 for none. None
    if each turn continues the one before."""
    temperature: float = 1.0
    routes: Array | None = None
    """(tokens, layers, experts per token): the sampler's experts of each token, or the dtype's
    maximum where they are unknown, as for the last token."""
    teacher_logprobs: Array | None = None
    """float32, the teacher's logprob of each trained token, if a server computed them."""
    schema: int = SAMPLE_SCHEMA

    def __post_init__(self) -> None:
        check_schema(self.schema, SAMPLE_SCHEMA, "sample", OLDEST_SCHEMA)
        num_tokens, num_trained = len(self.token_ids), len(self.trained)
        for name in ("logprobs", "advantages", "versions", "teacher_logprobs"):
            array = getattr(self, name)
            if array is not None and len(array) != num_trained:
                raise self._misaligned(f"{num_trained} trained tokens have {len(array)} {name}")
        if self.routes is not None and self.routes.shape[:-2] != (num_tokens,):
            raise self._misaligned(f"{num_tokens} tokens have routes of shape {self.routes.shape}")
        if self.advantages is not None and not np.isfinite(self.advantages.numpy()).all():
            raise self._misaligned("an advantage is not finite")
        trained = self.trained.numpy()
        covered = [np.arange(segment.start, segment.stop) for segment in self.segments]
        if not np.array_equal(trained, np.concatenate(covered) if covered else trained[:0]):
            raise self._misaligned(f"its segments do not cover {num_trained} trained tokens")
        if num_trained and (
            trained[0] < 1 or trained[-1] >= num_tokens or (np.diff(trained) < 1).any()
        ):
            problem = f"trained tokens are not ascending, or not in 1 to {num_tokens - 1}"
            raise self._misaligned(problem)
        check_slots(self.slots, num_tokens, f"sample {self.trace_id}: slots")
        for slot in self.slots:
            if not 0 <= slot.item < len(self.items):
                raise self._misaligned(f"slot names item {slot.item} of {len(self.items)}")

    def get_advantages(self) -> np.ndarray:
        """Return the advantages. Raise if they have not been computed."""
        if self.advantages is None:
            raise self._misaligned("it has no advantages yet")
        return self.advantages.numpy()

    def place_segments(self) -> Iterator[tuple[Segment, slice]]:
        """Yield each segment, with the places of its tokens among the trained ones."""
        start = 0
        for segment in self.segments:
            stop = start + segment.stop - segment.start
            yield segment, slice(start, stop)
            start = stop

    def expand_turns(self, per_turn: Sequence[float]) -> np.ndarray:
        """Expand one number per turn of the rollout to one per trained token."""
        values = [per_turn[segment.turn] for segment in self.segments]
        lengths = [segment.stop - segment.start for segment in self.segments]
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    def _misaligned(self, problem: str) -> Misaligned:
        fix = "drop the sample. Its producer is broken"
        return Misaligned(f"sample {self.trace_id}: {problem}", fix)


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The samples of one optimizer step. Step k turns policy version k-1 into version k."""

    step: int
    samples: list[Sample]
    schema: int = SAMPLE_SCHEMA
    replayed: list[str] = []
    """Ids of groups that an earlier batch has also trained."""

    def __post_init__(self) -> None:
        check_schema(self.schema, SAMPLE_SCHEMA, "batch", OLDEST_SCHEMA)

    def to_bytes(self) -> bytes:
        return _codec.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Batch:
        return _codec.decode(data)


_codec = Codec(Batch, "a batch")


def digest_batch(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
