"""Short messages between the processes of a run."""

from __future__ import annotations

import msgspec

from sightline.media import MediaRef
from sightline.media.stored_file import StoredFile
from sightline.wire.codec import Codec


class BatchReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="announce"):
    """Orchestrator to trainer: the batch of `step`, which is in the run directory by now."""

    step: int
    digest: str
    data: bytes


class FinishTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finish"):
    """Orchestrator to trainer: no batch follows; write a checkpoint and end."""

    last_step: int


class PublishedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="published"):
    """Trainer to orchestrator: the weights of `version` are where servers find them."""

    version: int
    epoch: int
    manifest: str
    """Path of the manifest in the run directory."""
    metrics: dict[str, float | None]
    checkpoint_step: int
    """The newest step that a checkpoint covers; batches up to it may go. 0 while the checkpoint is
    on its way to the run directory."""


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


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """A process on another machine to the orchestrator: it asks for its files of the run."""

    who: str
    release: str


class FileChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file of the run directory, or what came to the end of one."""

    name: str
    """Its path below the run directory."""
    data: bytes = b""
    stored: StoredFile | None = None
    """Where its bytes are, if it is large."""
    is_appended: bool = False
    is_removed: bool = False


class FileChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file_changes"):
    """Orchestrator to a process that joins: what it works on. From then on, that process to the
    orchestrator: what it has written, before it says anything that rests on it."""

    files: tuple[FileChange, ...]


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
    """Address of the inference server to ask; empty is any of the run's own."""
    min_version: int = 0
    """Oldest policy version that may sample for it."""


READY, UPDATING, DRAINING = "ready", "updating", "draining"
"""A server takes turns; it takes them, and may let them wait while it adopts a version; it ends
those that it has."""


class ServerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference server, as the orchestrator sees it."""

    url: str
    state: str = READY
    version: int | None = None
    """Policy version that it holds; None is not known."""
    load: int = 0
    """Requests that it had when it was last asked, of all clients."""
    is_own: bool = False
    """Whether the run started it, on another machine: it asks for the token of the run's own
    servers, and not for that of `[inference] token`."""


class ServerList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="servers"):
    """Orchestrator to worker: the servers that may be asked from now on."""

    servers: tuple[ServerStatus, ...]
    run: str
    """Id of the run, which the labels of its weights carry."""


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
    | JoinRequest
    | FileChanges
    | TrainingFinished
    | RolloutRequest
    | ServerList
    | RolloutResult
    | MemoryReport
    | CancelRollouts
    | QuitRequest
)

_codec = Codec[ControlMessage](ControlMessage, "a message between the processes of a run")
encode, decode, decode_from = _codec.encode, _codec.decode, _codec.decode_from
