"""The trainer as a process, of any rank: connects, loads, says that it is ready, runs the loop."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from threading import Event

from msgspec import structs
from torch import distributed as dist

from sightline.config import RunFile, SftFile
from sightline.errors import ProcessFailed, WireError
from sightline.media.stored_file import open_blobs
from sightline.run import RunDir
from sightline.run.mirror import RunMirror, is_copy
from sightline.trainer import loop
from sightline.trainer.blocks import import_compiler
from sightline.trainer.build import Orchestrator, build
from sightline.trainer.loop import TrainerComponents
from sightline.trainer.ranks import NO_CHANNEL, FollowerChannel, LeadChannel, RankInfo, open_channel
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog
from sightline.transport.message_stream import MAX_SILENCE_S
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.codec import get_release
from sightline.wire.control import BatchReady
from sightline.wire.rank_messages import EXIT_OTHER_RANK_FAILED

NAME = "trainer"


def run(config: RunFile | SftFile, run_dir: RunDir, ranks: RankInfo, name: str, hub: str) -> None:
    """Trains as one rank until there is nothing more to train.

    Rank 0 of `rl` hears the orchestrator at `hub`, and the other ranks hear rank 0 alone. It waits
    for every rank to start before the model is loaded, which is a collective, and for every rank
    to have loaded it before the first batch is handed out.
    """
    channel, stop = open_channel(ranks), Event()
    components: TrainerComponents | None = None
    if isinstance(config, SftFile) and ranks.is_lead:
        # In `rl` the orchestrator hears it, and announces no further batch.
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        # From here on it touches its heartbeat file, before the other ranks have come, too.
        limit_s, heartbeat_file = config.trainer.stall_timeout_s, run_dir.heartbeat(name)
        watchdog = StallWatchdog(limit_s, channel.fail, heartbeat_file)
        if isinstance(channel, LeadChannel):
            channel.wait_for_start()
        watchdog.enter("loading the model and its checkpoint", LONG_LIMIT_S)
        spoke = Spoke(hub, NAME, ranks.hub_key) if hub and ranks.is_lead else None
        orchestrator = None if spoke is None else _connect(spoke, config, run_dir)
        components = build(config, run_dir, orchestrator, ranks, channel, watchdog, stop)
        if isinstance(channel, LeadChannel):
            watchdog.idle()  # the barrier has a deadline of its own, and names who is missing
            channel.wait_until_loaded(components.first_step)
        elif isinstance(channel, FollowerChannel):
            channel.report_ready(components.first_step)
        if orchestrator is not None:
            hello = control.ProcessReady(NAME, components.first_step, release=get_release())
            orchestrator.send(hello)
        if isinstance(config, RunFile) and (components.first_step or config.inference.servers):
            # Servers that the run starts hold its checkpoint; others hold whatever they hold.
            watchdog.enter(f"publishing version {components.first_step}", LONG_LIMIT_S)
            components.run_writer.publish(components.first_step, {})
        watchdog.enter("importing the compiler", LONG_LIMIT_S)
        import_compiler(config.trainer.compile_backend)  # while the first rollouts are played
        watchdog.idle()
        loop.run(components)
    except BaseException as error:  # the other ranks are told first: they may wait in a collective
        channel.claim_end()
        cause = find_cause(error, components)
        channel.fail(f"{type(cause).__name__}: {cause}")
        if channel is not NO_CHANNEL and is_broken_collective(cause):
            # Whoever broke it has the cause; the launcher looks for that.
            traceback.print_exception(cause)
            sys.stderr.flush()
            os._exit(EXIT_OTHER_RANK_FAILED)
        if cause is error:
            raise
        raise cause from error
    if spoke is not None and not spoke.close(MAX_SILENCE_S):
        # Without its last words the orchestrator would wait for ever.
        raise ProcessFailed(
            "the orchestrator has not acknowledged the last messages of the trainer",
            "look at the log of the orchestrator, and at the network between the machines",
        )
    if not ranks.is_lead:  # rank 0's end goes with its process: others may still listen
        channel.close()


def find_cause(error: BaseException, components: TrainerComponents | None) -> BaseException:
    """What went wrong in a thread beside the loop, where that is why the loop failed."""
    tasks = [] if components is None else components.run_writer.background_tasks
    return next((task.problem for task in tasks if task.problem is not None), error)


def is_broken_collective(error: BaseException) -> bool:
    """Whether a rank cannot compute because another is gone."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return type(error) is RuntimeError and "gloo" in str(error)


def _connect(spoke: Spoke, config: RunFile | SftFile, run_dir: RunDir) -> Orchestrator:
    def tell(message: control.ControlMessage) -> None:
        spoke.send(control.encode(message))

    def announcements() -> BatchReady | None:
        data = spoke.receive()
        assert data is not None
        message = control.decode_from("orchestrator", data)
        if isinstance(message, (control.FinishTraining, control.QuitRequest)):
            return None
        if not isinstance(message, BatchReady):
            raise WireError(
                f"the trainer was sent a {type(message).__name__}", "this is a bug; report it"
            )
        return message

    if not is_copy(run_dir):
        return Orchestrator(announcements, tell)
    blobs = open_blobs(config.media.root, config.media.read_token(for_control=True))
    mirror = RunMirror(run_dir, tell, blobs)
    checkpoints = RunMirror(run_dir, tell, blobs, of_checkpoints=True)

    def send(message: control.ControlMessage) -> None:
        mirror.flush()
        if not isinstance(message, control.PublishedWeights):
            checkpoints.flush()
        elif checkpoints.is_behind():  # weights do not wait, and no batch goes meanwhile
            message = structs.replace(message, checkpoint_step=0)
        tell(message)

    return Orchestrator(announcements, send, checkpoints.flush)
