"""Messages between the ranks of a trainer. Images travel as references.

The channel proves which rank sent a message, so messages do not name their sender.
"""

from __future__ import annotations

import msgspec

from sightline.wire.codec import Codec
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.weights import WeightFile

EXIT_OTHER_RANK_FAILED = 3
"""Exit status of a rank that ends because another failed. The launcher reports the other."""


def rank_process_name(rank: int, lead: str = "trainer") -> str:
    """Return the name of this rank's process."""
    return f"{lead}-{rank}" if rank else lead


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses at which a trainer's ranks meet. It contains no secret."""

    run_dir: str
    address: str
    """host:port of torch.distributed."""
    channel: str
    """Address of rank 0's channel."""


class RankMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between ranks. Its subclasses, each with a tag, are all that the codec decodes."""


class RankStarted(RankMessage, frozen=True, tag="here"):
    """Tells rank 0 that a rank has started and listens. The rank has yet to load its model."""

    release: str = ""
    """The sender's version of sightline. Rank 0 refuses any version but its own."""


class RankReady(RankMessage, frozen=True, tag="hello"):
    """Tells rank 0 that a rank has loaded its model."""

    step: int
    """Step of the checkpoint that the rank starts from."""


class RankAssignment(RankMessage, frozen=True, tag="share"):
    """Sends a rank its share of the work in `step`."""

    step: int
    digest: str
    """Digest of the batch, as the orchestrator announced it."""
    micro_batches: list[MicroBatch | None]
    """One per round, None for an empty one. Every rank has the same number."""
    runs_tower: list[bool]
    """Whether any rank has an image in the round. If so, all ranks run the vision tower."""
    minibatch_sizes: list[int] | None = None
    """The number of rounds in each minibatch, in order; None for a single minibatch."""
    held_out: bool = False
    """Whether to evaluate it with the weights after `step` instead of training on it."""


class AssignmentReceived(RankMessage, frozen=True, tag="taken"):
    """Tells rank 0 that a share has arrived."""

    step: int


class ShardWritten(RankMessage, frozen=True, tag="wrote"):
    """Tells rank 0 that a rank's files of the checkpoint of `step` are on the disk."""

    step: int
    files: list[WeightFile]


class RankFailed(RankMessage, frozen=True, tag="failed"):
    """Tells rank 0 that a rank failed. Rank 0 sends it on to all ranks, which then end."""

    rank: int
    problem: str


class NoMoreWork(RankMessage, frozen=True, tag="over"):
    """Tells a rank that the share of `step` was the last."""

    step: int


_codec = Codec(RankMessage, "a message between ranks")
encode, decode, decode_from = _codec.encode, _codec.decode, _codec.decode_from
