"""The process of a trainer rank. It connects, loads the model, reports ready and runs the loop."""

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
    """Train as one rank until the run ends.

    Rank 0 of `rl` connects to the orchestrator at `hub`. Other ranks talk to rank 0 only. Rank 0
    waits for every rank to start before it loads the model, which is a collective, and for every
    rank to have loaded it before it hands out the first batch.
    """
    channel, stop = open_channel(ranks), Event()
    components: TrainerComponents | None = None
    if isinstance(config, SftFile) and ranks.is_lead:
        # In `rl` the orchestrator handles the signal.
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        # Start the heartbeat before waiting for the other ranks.
        limit_s, heartbeat_file = config.trainer.stall_timeout_s, run_dir.heartbeat(name)
        watchdog = StallWatchdog(limit_s, channel.fail, heartbeat_file)
        if isinstance(channel, LeadChannel):
            channel.wait_for_start()
        watchdog.enter("loading the model and its checkpoint", LONG_LIMIT_S)
        spoke = Spoke(hub, NAME, ranks.hub_key) if hub and ranks.is_lead else None
        orchestrator = None if spoke is None else _connect(spoke, config, run_dir)
        components = build(config, run_dir, orchestrator, ranks, channel, watchdog, stop)
        if isinstance(channel, LeadChannel):
            watchdog.idle()  # the barrier has its own deadline and names missing ranks
            channel.wait_until_loaded(components.first_step)
        elif isinstance(channel, FollowerChannel):
            channel.report_ready(components.first_step)
        if orchestrator is not None:
            orchestrator.send(control.ProcessReady(components.first_step, release=get_release()))
        if isinstance(config, RunFile) and (components.first_step or config.inference.servers):
            # Servers started by the run have its checkpoint. Other servers' weights are unknown.
            watchdog.enter(f"publishing version {components.first_step}", LONG_LIMIT_S)
            components.run_writer.publish(components.first_step, {})
        watchdog.enter("importing the compiler", LONG_LIMIT_S)
        import_compiler(config.trainer.compile_backend)  # during the first rollouts
        watchdog.idle()
        loop.run(components)
    except BaseException as error:
        # Tell the other ranks first: they may be waiting in a collective.
        channel.claim_end()
        cause = find_cause(error, components)
        channel.fail(f"{type(cause).__name__}: {cause}")
        if channel is not NO_CHANNEL and is_broken_collective(cause):
            # The rank that broke the collective has the cause, and the launcher reports it.
            traceback.print_exception(cause)
            sys.stderr.flush()
            os._exit(EXIT_OTHER_RANK_FAILED)
        if cause is error:
            raise
        raise cause from error
    if spoke is not None and not spoke.close(MAX_SILENCE_S):
        # The orchestrator would wait forever for the last message.
        raise ProcessFailed(
            "the orchestrator has not acknowledged the trainer's last messages",
            "check the orchestrator's log and the network between the machines",
        )
    if not ranks.is_lead:  # rank 0 closes its end at process exit: others may still listen
        channel.close()


def find_cause(error: BaseException, components: TrainerComponents | None) -> BaseException:
    """Return the error of a background task if it made the loop fail, or else `error`."""
    tasks = [] if components is None else components.run_writer.background_tasks
    return next((task.problem for task in tasks if task.problem is not None), error)


def is_broken_collective(error: BaseException) -> bool:
    """Return whether a collective failed because another rank is gone."""
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
                f"the trainer received a {type(message).__name__}", "this is a bug. Report it"
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
        elif checkpoints.is_behind():  # publish without waiting for it, and remove no batch yet
            message = structs.replace(message, checkpoint_step=0)
        tell(message)

    return Orchestrator(announcements, send, checkpoints.flush)
