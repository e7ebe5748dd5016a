"""Messages between the ranks of a trainer. Items travel as references."""

from __future__ import annotations

import msgspec

from sightline.wire.codec import Codec
from sightline.wire.micro_batch import MicroBatch
from sightline.wire.weights import WeightFile

EXIT_OTHER_RANK_FAILED = 3
"""Exit status of a rank that ends because another failed; the launcher reports the other."""


def rank_process_name(rank: int, lead: str = "trainer") -> str:
    """Name of the process that computes as this rank."""
    return f"{lead}-{rank}" if rank else lead


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the ranks of one trainer meet. What they know one another by is told nobody here."""

    run_dir: str
    address: str
    """host:port of torch.distributed."""
    channel: str
    """The address at which rank 0 hears the others."""


class RankStarted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="here"):
    """A rank has started, and listens; it has yet to load its model."""

    rank: int
    release: str = ""
    """The sender's version of sightline; of another one it is refused."""


class RankReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """A rank has loaded its model."""

    rank: int
    step: int
    """Step of the checkpoint that it starts from."""


class RankAssignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="share"):
    """Rank 0 to a rank: what it computes in `step`."""

    step: int
    digest: str
    """Digest of the batch, as the orchestrator announced it."""
    micro_batches: list[MicroBatch | None]
    """One a round, None for an empty one; every rank has as many."""
    runs_tower: list[bool]
    """Whether some rank shows an item in the round: then all go through the vision tower."""
    held_out: bool = False
    """To be evaluated with the weights after `step`; nothing is learnt from it."""


class AssignmentReceived(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="taken"):
    """A rank to rank 0: the share has arrived."""

    rank: int
    step: int


class ShardWritten(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wrote"):
    """A rank to rank 0: its files of the checkpoint of `step` are on the disk."""

    rank: int
    step: int
    files: list[WeightFile]


class RankFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    """A rank to rank 0, and from there to all: this rank failed, and so all end."""

    rank: int
    problem: str


class NoMoreWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="over"):
    """Rank 0 to a rank: no share follows that of `step`."""

    step: int


RankMessage = (
    RankStarted
    | RankReady
    | RankAssignment
    | AssignmentReceived
    | ShardWritten
    | RankFailed
    | NoMoreWork
)

_codec = Codec[RankMessage](RankMessage, "a message between ranks")
encode, decode, decode_from = _codec.encode, _codec.decode, _codec.decode_from
