"""The trainer as a process: connects, says that it is ready, and runs the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.config import RunFile, SftFile
from sightline.errors import WireError
from sightline.run import RunDir
from sightline.trainer import loop, sft
from sightline.trainer.build import build, build_follower
from sightline.trainer.ranks import FollowerChannel, LeadChannel, RankInfo
from sightline.trainer.watchdog import LONG_LIMIT_S, StallWatchdog
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.control import (
    BatchReady,
    ControlMessage,
    FinishTraining,
    ProcessReady,
    QuitRequest,
)
from sightline.wire.rank_messages import rank_process_name

NAME = "trainer"
SFT_NAME = "sft"
LOADING = "loading the model and its checkpoint"


def main(config: RunFile, run_dir: RunDir, hub: str, ranks: RankInfo) -> None:
    """Rank 0, which hears the orchestrator; or the only one."""
    spoke = Spoke(hub, NAME)
    lead = LeadChannel(ranks) if ranks.size > 1 else None

    def send(message: ControlMessage) -> None:
        spoke.send(control.encode(message))

    def announcements() -> BatchReady | None:
        data = spoke.receive()
        assert data is not None
        message = control.decode(data)
        if isinstance(message, (FinishTraining, QuitRequest)):
            if lead is not None:
                lead.announce_end()
            return None
        if not isinstance(message, BatchReady):
            raise WireError(
                f"the trainer was sent a {type(message).__name__}", "this is a bug; report it"
            )
        return message

    with _report_failure(lead):
        watchdog = _build_watchdog(config, lead, run_dir.heartbeat(NAME))
        if lead is not None:
            lead.meet()
        watchdog.mark(LOADING, LONG_LIMIT_S)
        components = build(config, run_dir, announcements, send, ranks, lead, watchdog)
        if lead is not None:
            watchdog.rest()  # the barrier has a deadline of its own, and names who is missing
            lead.gather(components.first_step)
        send(ProcessReady(NAME, components.first_step))
        _publish_first(config, components)
        loop.run(components)
    spoke.close()


def run_follower(config: RunFile, run_dir: RunDir, ranks: RankInfo) -> None:
    """Any other rank: it hears rank 0 alone."""
    channel = FollowerChannel(ranks)
    with _report_failure(channel):
        watchdog = _build_watchdog(
            config, channel, run_dir.heartbeat(rank_process_name(ranks.rank))
        )
        watchdog.mark(LOADING, LONG_LIMIT_S)
        components = build_follower(config, run_dir, ranks, channel, watchdog)
        channel.report_ready(components.first_step)
        _publish_first(config, components)
        loop.run(components)
    channel.close()


def _publish_first(config: RunFile, components: loop.TrainerComponents) -> None:
    """Servers that the run starts hold its checkpoint; others hold whatever they hold."""
    if components.first_step > 0 or config.inference.servers:
        components.watchdog.mark(f"publishing version {components.first_step}", LONG_LIMIT_S)
        components.run_writer.republish(components.first_step)
    components.watchdog.rest()


def _build_watchdog(
    config: RunFile | SftFile,
    channel: LeadChannel | FollowerChannel | None,
    beat: Path | None = None,
) -> StallWatchdog:
    """What watches this process from its start: it beats before the others have come, too."""
    tell = channel.fail if channel is not None else lambda problem: None
    return StallWatchdog(config.trainer.stall_timeout_s, tell, beat)


def run_supervised(config: SftFile, run_dir: RunDir, ranks: RankInfo) -> None:
    """Supervised training, as any rank: there is no orchestrator to hear."""
    heartbeat = run_dir.heartbeat(rank_process_name(ranks.rank, SFT_NAME))
    if not ranks.is_lead:
        channel = FollowerChannel(ranks)
        with _report_failure(channel):
            watchdog = _build_watchdog(config, channel, heartbeat)
            watchdog.mark(LOADING, LONG_LIMIT_S)
            components = sft.build_follower(config, run_dir, ranks, channel, watchdog)
            channel.report_ready(components.first_step)
            components.learner.watchdog.rest()
            sft.run(components)
        channel.close()
        return
    lead = LeadChannel(ranks) if ranks.size > 1 else None
    with _report_failure(lead):
        watchdog = _build_watchdog(config, lead, heartbeat)
        if lead is not None:
            lead.meet()
        watchdog.mark(LOADING, LONG_LIMIT_S)
        components = sft.build(config, run_dir, ranks, lead, watchdog)
        components.learner.watchdog.rest()
        if lead is not None:
            lead.gather(components.first_step)
        sft.run(components)


@contextmanager
def _report_failure(channel: LeadChannel | FollowerChannel | None) -> Iterator[None]:
    """Tells the other ranks of a failure before it goes on: they may wait in a collective."""
    try:
        yield
    except BaseException as error:
        if channel is not None:
            channel.fail(f"{type(error).__name__}: {error}")
        raise
