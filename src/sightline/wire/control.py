"""Control messages between the processes of a run."""

from __future__ import annotations

import msgspec

from sightline.media import MediaRef
from sightline.media.stored_file import StoredFile
from sightline.wire.codec import Codec


class ControlMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A control message. Its subclasses, each with a tag, are all that the codec decodes."""


class BatchReady(ControlMessage, frozen=True, tag="announce"):
    """Sends the trainer the batch of `step`, which is also in the run directory."""

    step: int
    digest: str
    data: bytes


class FinishTraining(ControlMessage, frozen=True, tag="finish"):
    """Tells the trainer that there is no further batch. It writes a checkpoint and ends."""

    last_step: int


class PublishedWeights(ControlMessage, frozen=True, tag="published"):
    """Tells the orchestrator that servers can adopt `version`."""

    version: int
    epoch: int
    manifest: str
    """Path of the manifest in the run directory."""
    metrics: dict[str, float | None]
    checkpoint_step: int
    """The newest step that a checkpoint covers: batches up to it can be removed. 0 while the
    checkpoint is being copied to the run directory."""


class ProcessReady(ControlMessage, frozen=True, tag="ready"):
    """Tells the orchestrator that a worker or the trainer has started and listens."""

    version: int = 0
    after: str = ""
    """How the previous process of this name ended. Empty for the first."""
    release: str = ""
    """The sender's version of sightline. Other versions are refused."""


class TrainingFinished(ControlMessage, frozen=True, tag="finished"):
    """Tells the orchestrator that the trainer has written the last checkpoint."""

    step: int


class JoinRequest(ControlMessage, frozen=True, tag="join"):
    """Asks the orchestrator for the files of the run that a process on another machine needs."""

    release: str


class FileChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file of the run directory, or bytes appended to one."""

    name: str
    """Path relative to the run directory."""
    data: bytes = b""
    stored: StoredFile | None = None
    """The parts in the store, for a large file."""
    is_appended: bool = False
    is_removed: bool = False


class FileChanges(ControlMessage, frozen=True, tag="file_changes"):
    """Sends a joining process the files that it needs. Later, that process sends the orchestrator
    the files that it has written, before any message that depends on them."""

    files: tuple[FileChange, ...]


class RolloutRequest(ControlMessage, frozen=True, tag="play"):
    """Asks a worker to play one task once."""

    rollout_id: str
    group_id: str
    task: int
    """Index of the task in its split."""
    split: str
    """The split: `train` or `eval`."""
    seed: int
    temperature: float
    exchanged: tuple[MediaRef, ...] = ()
    """Images that replace the task's own, in order, to test whether the model uses images."""
    server: str = ""
    """Address of the inference server to use. Empty for any of the run's own."""
    min_version: int = 0
    """Oldest policy version that may sample for it."""


READY, UPDATING, DRAINING = "ready", "updating", "draining"
"""States of a server: it accepts requests; it accepts them, but they may wait for a weight update;
it only finishes its current requests."""


class ServerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An inference server, as the orchestrator sees it. `logs/servers.json` lists them."""

    url: str
    state: str = READY
    version: int | None = None
    """Policy version that it holds; None if unknown."""
    load: int = 0
    """Number of its requests, from all clients, at the last poll."""
    is_own: bool = False
    """Whether the run started it on another machine. It then requires the token of the run's own
    servers, not `[inference] token`."""
    problem: str = ""
    """Reason why it is lost, refused or behind."""


class ServerList(ControlMessage, frozen=True, tag="servers"):
    """Tells a worker which servers to use from now on."""

    servers: tuple[ServerStatus, ...]
    run: str
    """Id of the run, which the labels of its weights carry."""


class RolloutResult(ControlMessage, frozen=True, tag="played"):
    """Sends the orchestrator the trace of a rollout, finished or broken."""

    rollout_id: str
    trace: bytes
    """An encoded trace. Its images are references."""


class CancelRollouts(ControlMessage, frozen=True, tag="cancel"):
    """Tells a worker to stop all rollouts."""


class QuitRequest(ControlMessage, frozen=True, tag="quit"):
    """Tells a process to shut down."""


_codec = Codec(ControlMessage, "a message between the processes of a run")
encode, decode, decode_from = _codec.encode, _codec.decode, _codec.decode_from
