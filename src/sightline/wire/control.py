"""Short messages between the processes of a run."""

from __future__ import annotations

import msgspec

from sightline.media import MediaRef
from sightline.wire.codec import Codec


class BatchReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="announce"):
    """Orchestrator to trainer: the batch of `step` is on disk."""

    step: int
    path: str
    digest: str


class FinishTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finish"):
    """Orchestrator to trainer: no batch follows; write a checkpoint and end."""

    last_step: int


class PublishedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="published"):
    """Trainer to orchestrator: the weights of `version` are on disk."""

    version: int
    epoch: int
    manifest: str
    metrics: dict[str, float | None]
    checkpoint_step: int
    """The newest step that a checkpoint covers; batches up to it may go."""


class ProcessReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """A worker or the trainer has started and listens."""

    who: str
    version: int = 0
    after: str = ""
    """How the process ended that this one replaces; empty for the first of its name."""
    release: str = ""
    """The sender's version of sightline; of another one it is refused."""


class TrainingFinished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finished"):
    """Trainer to orchestrator: the last checkpoint is written."""

    step: int


class RolloutRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="play"):
    """Orchestrator to worker: play one task once."""

    rollout_id: str
    group_id: str
    task: int
    """Index of the task in its split."""
    split: str
    """Which tasks the index counts: `train` or `eval`."""
    seed: int
    temperature: float
    exchanged: tuple[MediaRef, ...] = ()
    """Images to show in place of the task's own, in order: tells whether a model looks."""
    server: str = ""
    """Address of the inference server to ask; empty is the run's own."""


class RolloutResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="played"):
    """Worker to orchestrator: the trace of a rollout, finished or broken."""

    rollout_id: str
    group_id: str
    trace: bytes
    """An encoded trace; its images are references."""
    wire: dict[str, int] = {}
    """Bytes that crossed the worker's wires to the server and to agents so far, by kind."""
    held_bytes: int = 0
    """Bytes that the rollout took in the worker's memory at its end."""


class MemoryReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="held"):
    """Worker to orchestrator: what its rollouts take in memory now."""

    held_bytes: int


class CancelRollouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cancel"):
    """Orchestrator to worker: these rollouts are of no use any more; empty means all."""

    rollout_ids: tuple[str, ...] = ()


class QuitRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="quit"):
    """Orchestrator to any process: end in order."""


ControlMessage = (
    BatchReady
    | FinishTraining
    | PublishedWeights
    | ProcessReady
    | TrainingFinished
    | RolloutRequest
    | RolloutResult
    | MemoryReport
    | CancelRollouts
    | QuitRequest
)

_codec = Codec[ControlMessage](ControlMessage, "a message between the processes of a run")
encode, decode, decode_from = _codec.encode, _codec.decode, _codec.decode_from
