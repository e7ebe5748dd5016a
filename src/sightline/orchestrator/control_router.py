"""Control messages between the orchestrator and the other processes of a run.

a batch waits for: a trainer that is ready       unblocked by: ProcessReady
the trainer's messages wait for: its files       unblocked by: writes to the run directory
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from sightline.errors import PeerLost, ProcessFailed, WireError
from sightline.orchestrator.loop import Orchestrator
from sightline.orchestrator.remote_files import RemoteFiles
from sightline.orchestrator.server_pool import run_until_first
from sightline.regular_file import read_text
from sightline.rollout.client import ChangeSignal
from sightline.run.mirror import BEAT
from sightline.transport.zmq_channel import AsyncHub
from sightline.wire import control
from sightline.wire.codec import check_release
from sightline.wire.control import (
    BatchReady,
    ControlMessage,
    FileChanges,
    FinishTraining,
    JoinRequest,
    ProcessReady,
    PublishedWeights,
    RolloutResult,
    ServerList,
    TrainingFinished,
)

TRAINER = "trainer"


@dataclass
class ControlRouter:
    """Sends control messages and dispatches received ones."""

    hub: AsyncHub
    peers: frozenset[str]
    """Names of the processes whose messages are accepted."""
    ready: dict[str, ProcessReady] = field(default_factory=dict)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    last_step: int = 0
    """The step of the trainer's last checkpoint."""
    announced: int | None = None
    """The last step sent to the trainer; None while there is no trainer."""
    is_finishing: bool = False
    """Whether the trainer should finish after the last batch."""
    servers: ServerList | None = None
    """The servers that workers may use."""
    remote_files: RemoteFiles | None = None
    """The run directory, for processes on machines that do not share it."""
    trainer_error_file: Path | None = None
    """File with the error of a failed trainer on another machine; None for a local trainer."""
    trainer_timeout_s: float = 3600.0
    """Maximum time without a message from a remote trainer. It sends a heartbeat every second once
    it has its copy of the run. A restart on another node, including that copy, must fit in it."""
    orchestrator: Orchestrator = field(init=False)
    """Handles the messages of the other processes."""

    def __post_init__(self) -> None:
        self._ready_changed = ChangeSignal()
        self._telling = asyncio.Lock()
        self._from_trainer: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._joining: asyncio.Queue[str] = asyncio.Queue()
        self._checkpoints: asyncio.Queue[FileChanges] = asyncio.Queue()
        self._num_unwritten = 0
        """Number of messages in the queue of checkpoint files that are not written yet."""
        self._trainer_heard_at = math.inf

    async def send(self, peer: str, message: ControlMessage) -> None:
        await self.hub.send(peer, control.encode(message))

    async def announce(self, ready: BatchReady) -> None:
        """Announce a batch on disk to the trainer. A trainer that starts later gets it then."""
        await self._tell_trainer([ready])

    async def finish(self) -> None:
        """Tell the trainer that this was the last batch."""
        self.is_finishing = True
        await self._tell_trainer([])

    async def _tell_trainer(self, batches: Sequence[BatchReady]) -> None:
        async with self._telling:
            try:
                for ready in batches:
                    if self.announced == ready.step - 1:
                        await self.send(TRAINER, ready)
                        self.announced = ready.step
                if self.is_finishing and self.announced is not None:
                    await self.send(TRAINER, FinishTraining(self.announced))
            except ProcessFailed:
                # The trainer has just ended. The launcher ends the run or restarts it.
                self.announced = None

    async def _on_trainer_ready(self, at: int) -> None:
        """Announce all batches after step `at` to a trainer that starts from its checkpoint."""
        self.orchestrator.policies.last = None  # it publishes this and later versions again
        self.announced = at
        await self._tell_trainer(self.orchestrator.run_state.announcements_after(at))

    async def tell_servers(self, servers: ServerList) -> None:
        """Tell the workers which servers they may use."""
        self.servers = servers
        for worker in self.ready.keys() - {TRAINER}:
            with suppress(ProcessFailed):  # its successor gets the list when it is ready
                await self.send(worker, servers)

    async def wait_until_ready(self, names: set[str]) -> None:
        while not names <= self.ready.keys():
            await self._ready_changed.wait()

    async def keep_receiving(self) -> None:
        """Handle messages until cancelled."""
        await run_until_first(
            self._keep_receiving(), self._keep_heeding_trainer(), self._keep_giving_files(),
            self._keep_writing_checkpoints(), self._keep_watching_trainer(),
        )  # fmt: skip

    async def _keep_receiving(self) -> None:
        rollouts = self.orchestrator.rollouts
        while True:
            try:
                peer, data = await self.hub.receive()
            except PeerLost as lost:  # the launcher or the cluster restarts its process
                print(lost, file=sys.stderr, flush=True)
                if self.ready.pop(lost.peer, None) and lost.peer != TRAINER:
                    rollouts.on_worker_lost(lost.peer, f"silence: {lost.problem}")
                continue
            if peer not in self.peers:
                raise WireError(
                    f"{peer} sent a message, and is not a process of this run",
                    "keep the run's secret from other processes",
                )
            message = control.decode_from(peer, data)
            if peer == TRAINER:
                self._trainer_heard_at = time.monotonic()
                if isinstance(message, ProcessReady) and self.trainer_error_file is not None:
                    self.trainer_error_file.unlink(missing_ok=True)  # left by its predecessor
            match message:
                case RolloutResult() if peer != TRAINER:
                    rollouts.on_result(message)
                case JoinRequest() if peer != TRAINER and self.remote_files is not None:
                    check_release(message.release, peer)
                    self._joining.put_nowait(peer)
                case FileChanges(files) if self.remote_files is not None and (
                    peer != TRAINER or all(file.name.endswith(BEAT) for file in files)
                ):
                    await asyncio.to_thread(self.remote_files.write, peer, message)
                case ProcessReady() if peer != TRAINER:
                    check_release(message.release, peer)
                    if message.after or peer in self.ready:
                        rollouts.on_worker_lost(
                            peer, message.after or "crash: it was started again"
                        )
                    if self.servers is not None:
                        await self.send(peer, self.servers)
                    self._note_ready(peer, message)
                case _ if peer == TRAINER:
                    self._from_trainer.put_nowait(message)
                case _:
                    raise _unexpected_error(peer, message)

    async def _keep_giving_files(self) -> None:
        """Send joining processes their files. The first may wait for the model's upload."""
        while True:
            await self._give_files(await self._joining.get())

    async def _give_files(self, peer: str) -> None:
        assert self.remote_files is not None
        files = await asyncio.to_thread(self.remote_files.collect, peer)
        with suppress(ProcessFailed):  # it has just ended, and its successor will ask
            await self.send(peer, files)

    async def _keep_heeding_trainer(self) -> None:
        """Handle the trainer's messages in order. A restarted trainer needs the files in them."""
        while True:
            message = await self._from_trainer.get()
            match message:
                case JoinRequest() if self.remote_files is not None:
                    check_release(message.release, TRAINER)
                    self.announced = None
                    await self._checkpoints.join()
                    await self._give_files(TRAINER)
                case FileChanges(files) if self.remote_files is not None:
                    if all(file.name.startswith("checkpoints/") for file in files):
                        # New weights must not wait for large checkpoints.
                        self._num_unwritten += 1
                        self._checkpoints.put_nowait(message)
                    else:
                        await asyncio.to_thread(self.remote_files.write, TRAINER, message)
                case PublishedWeights():
                    if self._num_unwritten:  # perhaps the checkpoint that covers the batches
                        message = structs.replace(message, checkpoint_step=0)
                    self.orchestrator.publish(message)
                case ProcessReady():
                    check_release(message.release, TRAINER)
                    await self._on_trainer_ready(message.version)
                    self._note_ready(TRAINER, message)
                case TrainingFinished(step) if step <= self.orchestrator.run_state.progress.step:
                    await self._checkpoints.join()
                    self.last_step = step
                    self.finished.set()
                case _:
                    raise _unexpected_error(TRAINER, message)

    async def _keep_writing_checkpoints(self) -> None:
        while True:
            message = await self._checkpoints.get()
            assert self.remote_files is not None
            await asyncio.to_thread(self.remote_files.write, TRAINER, message)
            self._num_unwritten -= 1
            self._checkpoints.task_done()

    async def _keep_watching_trainer(self) -> None:
        """Raise when a trainer on another machine is lost and was not replaced."""
        while True:
            await asyncio.sleep(min(30.0, self.trainer_timeout_s / 4))
            silent_s = time.monotonic() - self._trainer_heard_at
            if self.trainer_error_file is not None and silent_s > self.trainer_timeout_s:
                lost = f"no message from a trainer for {silent_s:.0f} s"
                fix = "check the cluster's log of the trainer, then resume the run"
                with suppress(OSError, ValueError):  # there is no such file
                    left = json.loads(read_text(self.trainer_error_file))
                    lost, fix = f"{lost}; the last one failed: {left['problem']}", left["fix"]
                raise ProcessFailed(lost, fix)

    def _note_ready(self, peer: str, message: ProcessReady) -> None:
        self.ready[peer] = message
        self._ready_changed.notify()


def _unexpected_error(peer: str, message: ControlMessage) -> WireError:
    return WireError(
        f"{peer} sent an unexpected message: {str(message)[:200]}", "this is a bug. Report it"
    )
