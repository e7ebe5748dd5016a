"""One message of a trace, with exactly the tokens that the engine received or sampled."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from sightline.errors import Misaligned
from sightline.message import Message
from sightline.wire import Array, MediaItem, Slot, Span
from sightline.wire.generate import VersionSpan
from sightline.wire.item import check_slots
from sightline.wire.weights import PolicyLabel, parse_version_label

ROOT = -1
"""The parent of a first message."""
NO_TOOLS = -1


def int32_array(values: Iterable[int]) -> Array:
    """Return ids as an int32 array. This is several times faster than numpy."""
    ids = array("i", values)
    return Array(dtype="int32", shape=(len(ids),), data=ids.tobytes())


def float32_array(values: Iterable[float]) -> Array:
    numbers = array("f", values)
    return Array(dtype="float32", shape=(len(numbers),), data=numbers.tobytes())


class PolicySpan(Span, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The policy that sampled tokens [start, stop), relative to a node's first sampled token."""

    version: int
    epoch: int
    run: str = ""
    """The id of the run that published the policy. This and `digest` are empty in older traces and
    for weights without a run."""
    digest: str = ""
    """The first 16 hex digits of the weights' digest."""

    @classmethod
    def of(cls, span: VersionSpan) -> PolicySpan:
        """Convert a span of the generate protocol and parse its label."""
        return cls(span.start, span.end, **parse_version_label(span.version)._asdict())

    @property
    def policy(self) -> PolicyLabel:
        return PolicyLabel(self.version, self.epoch, self.run, self.digest)


_NO_LOGPROBS = Array(dtype="float32", shape=(0,), data=b"")


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message and its tokens. The tokens from the root to a node are exactly the engine's tokens.

    Sampled tokens are a suffix. Tokens that close a truncated turn are not sampled and belong to
    the next node. The header of an assistant's turn is not sampled and belongs to the assistant's
    node.
    """

    id: int
    """The index of the node in the trace."""
    parent: int
    """The id of the previous node, which is smaller. -1 for the first message."""
    message: Message
    token_ids: Array
    """The message's token ids, including its marks, as int32."""
    sampled_start: int
    """The index of the first sampled token. Equals the number of tokens if none was sampled."""
    logprobs: Array = _NO_LOGPROBS
    """The logprob of each sampled token, as float32."""
    versions: tuple[PolicySpan, ...] = ()
    """The policy versions of the sampled tokens. Their spans cover these tokens without gaps."""
    routes: Array | None = None
    """The experts that predicted each token, which are those of the token before: (tokens, layers,
    experts per token). None if the engine does not report them."""
    slots: tuple[Slot[MediaItem], ...] = ()
    """The slots of the message's images, at offsets from the start of the node."""
    finish_reason: str = ""
    """The engine's finish reason, such as stop or length. Empty if nothing was sampled."""
    tools: int = NO_TOOLS
    """The index of the turn's toolset."""

    def __post_init__(self) -> None:
        num_tokens, num_sampled = len(self.token_ids), self.num_sampled
        if not 0 <= self.sampled_start <= num_tokens or len(self.logprobs) != num_sampled:
            raise Misaligned(
                f"node {self.id} has {len(self.logprobs)} logprobs for {num_tokens} tokens, "
                f"sampled starting at {self.sampled_start}",
                "drop the rollout. Its producer is broken",
            )
        if bool(self.finish_reason) != bool(num_sampled):
            raise Misaligned(
                f"node {self.id} has {num_sampled} sampled tokens and the finish reason "
                f"{self.finish_reason!r}",
                "a node has both or neither",
            )
        if self.routes is not None and self.routes.shape[:-2] != (num_tokens,):
            raise Misaligned(
                f"node {self.id} has routes of shape {self.routes.shape} for {num_tokens} tokens",
                "drop the rollout. Its producer is broken",
            )
        check_policy_spans(self.versions, num_sampled, f"node {self.id}")
        # An image belongs to one message and is never sampled.
        check_slots(self.slots, self.sampled_start, f"node {self.id}: slots")

    @property
    def is_turn(self) -> bool:
        """Return whether the model sampled the message."""
        return self.sampled_start < len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.sampled_start


def check_policy_spans(versions: Sequence[PolicySpan], num_sampled: int, what: str) -> None:
    """Raise unless the spans cover the sampled tokens without gaps or overlaps."""
    starts, stops = [span.start for span in versions], [span.stop for span in versions]
    if [*starts, num_sampled] == [0, *stops] and all(map(operator.lt, starts, stops)):
        return
    raise Misaligned(
        f"{what}: versions cover {[(s.start, s.stop) for s in versions]} of {num_sampled} "
        "sampled tokens",
        "the engine must report the version of every token once, in order",
    )
