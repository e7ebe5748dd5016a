"""One message of a trace, with exactly the tokens that the engine saw or said for it."""

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
    """An int32 array of a list of ids; several times faster than through numpy."""
    ids = array("i", values)
    return Array(dtype="int32", shape=(len(ids),), data=ids.tobytes())


def float32_array(values: Iterable[float]) -> Array:
    numbers = array("f", values)
    return Array(dtype="float32", shape=(len(numbers),), data=numbers.tobytes())


class PolicySpan(Span, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Tokens [start, stop), counted from a node's first sampled one, come from this policy."""

    version: int
    epoch: int
    run: str = ""
    """Id of the run that published it; this and `digest` are empty in older traces, and for
    weights of no run."""
    digest: str = ""
    """The first 16 hex digits of the weights' digest."""

    @classmethod
    def of(cls, span: VersionSpan) -> PolicySpan:
        """The span as the generate protocol writes it, its label taken apart."""
        return cls(span.start, span.end, **parse_version_label(span.version)._asdict())

    @property
    def policy(self) -> PolicyLabel:
        return PolicyLabel(self.version, self.epoch, self.run, self.digest)


_NO_LOGPROBS = Array(dtype="float32", shape=(0,), data=b"")


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Concatenating `token_ids` from the root gives what the engine saw and said.

    Sampled tokens are a suffix: what closes a turn that was cut off is not sampled, and stands at
    the start of the next node. The header of an assistant's turn is not sampled either, and stands
    at the start of the assistant's own node.
    """

    id: int
    """The index of the node among those of the trace."""
    parent: int
    """The id of the node before it, smaller than its own; -1 for none."""
    message: Message
    token_ids: Array
    """int32 ids of the tokens of the message, its marks included."""
    sampled_start: int
    """Tokens from here on were sampled; the number of tokens when none was."""
    logprobs: Array = _NO_LOGPROBS
    """float32: the logprob of each sampled token."""
    versions: tuple[PolicySpan, ...] = ()
    """The policy versions that sampled; their spans tile the sampled tokens."""
    slots: tuple[Slot[MediaItem], ...] = ()
    """The images that the message brought, at offsets from the start of the node."""
    finish_reason: str = ""
    """stop, length or what else the engine said; empty when nothing was sampled."""
    tools: int = NO_TOOLS
    """Which of the trace's toolsets the turn was asked with."""

    def __post_init__(self) -> None:
        num_tokens, num_sampled = len(self.token_ids), self.num_sampled
        if not 0 <= self.sampled_start <= num_tokens or len(self.logprobs) != num_sampled:
            raise Misaligned(
                f"node {self.id}: {len(self.logprobs)} logprobs for {num_tokens} tokens, sampled "
                f"from {self.sampled_start} on",
                "drop the rollout; its producer is broken",
            )
        if bool(self.finish_reason) != bool(num_sampled):
            raise Misaligned(
                f"node {self.id}: {num_sampled} sampled tokens, finish reason "
                f"{self.finish_reason!r}",
                "a node has both or neither",
            )
        check_policy_spans(self.versions, num_sampled, f"node {self.id}")
        # An image lies in the tokens of one message, and is never sampled.
        check_slots(self.slots, self.sampled_start, f"node {self.id}: slots")

    @property
    def is_turn(self) -> bool:
        """Whether the model sampled it in this trace."""
        return self.sampled_start < len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.sampled_start


def check_policy_spans(versions: Sequence[PolicySpan], num_sampled: int, what: str) -> None:
    """Spans follow one another from the first sampled token to the last."""
    starts, stops = [span.start for span in versions], [span.stop for span in versions]
    if [*starts, num_sampled] == [0, *stops] and all(map(operator.lt, starts, stops)):
        return
    raise Misaligned(
        f"{what}: versions cover {[(s.start, s.stop) for s in versions]} of {num_sampled} "
        "sampled tokens",
        "the engine must name the version of every token, in order, once",
    )
