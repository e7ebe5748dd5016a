"""The trainer as a process: connects, says that it is ready, and runs the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sightline.config import RunFile, SftFile
from sightline.errors import WireError
from sightline.monitor import RunDir
from sightline.trainer import loop, sft
from sightline.trainer.build import build, build_follower
from sightline.trainer.pulse import LONG_S, Pulse
from sightline.trainer.ranks import Follow, Lead, Ranks
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.control import Announce, Control, Finish, Quit, Ready
from sightline.wire.share import name_of_rank

NAME = "trainer"
LOADING = "loading the model and its checkpoint"


def main(config: RunFile, run_dir: RunDir, hub: str, ranks: Ranks) -> None:
    """Rank 0, which hears the orchestrator; or the only one."""
    spoke = Spoke(hub, NAME)
    lead = Lead(ranks) if ranks.size > 1 else None

    def send(message: Control) -> None:
        spoke.send(control.encode(message))

    def announcements() -> Announce | None:
        data = spoke.receive()
        assert data is not None
        message = control.decode(data)
        if isinstance(message, (Finish, Quit)):
            if lead is not None:
                lead.over()
            return None
        if not isinstance(message, Announce):
            raise WireError(
                f"the trainer was sent a {type(message).__name__}", "this is a bug; report it"
            )
        return message

    with _telling(lead):
        pulse = _pulse(config, lead, run_dir.beat(NAME))
        if lead is not None:
            lead.meet()
        pulse.mark(LOADING, LONG_S)
        parts = build(config, run_dir, announcements, send, ranks, lead, pulse)
        if lead is not None:
            pulse.rest()  # the barrier has a deadline of its own, and names who is missing
            lead.gather(parts.first_step)
        send(Ready(NAME, parts.first_step))
        _publish_first(config, parts)
        loop.run(parts)
    spoke.close()


def follow(config: RunFile, run_dir: RunDir, ranks: Ranks) -> None:
    """Any other rank: it hears rank 0 alone."""
    channel = Follow(ranks)
    with _telling(channel):
        pulse = _pulse(config, channel, run_dir.beat(name_of_rank(ranks.rank)))
        pulse.mark(LOADING, LONG_S)
        parts = build_follower(config, run_dir, ranks, channel, pulse)
        channel.hello(parts.first_step)
        _publish_first(config, parts)
        loop.run(parts)
    channel.close()


def _publish_first(config: RunFile, parts: loop.Parts) -> None:
    """Servers that the run starts hold its checkpoint; others hold whatever they hold."""
    if parts.first_step > 0 or config.inference.servers:
        parts.pulse.mark(f"publishing version {parts.first_step}", LONG_S)
        parts.keeper.publish_again(parts.first_step)
    parts.pulse.rest()


def _pulse(
    config: RunFile | SftFile, channel: Lead | Follow | None, beat: Path | None = None
) -> Pulse:
    """What watches this process from its start: it beats before the others have come, too."""
    tell = channel.fail if channel is not None else lambda problem: None
    return Pulse(config.trainer.stuck_after_s, tell, beat)


def imitate(config: SftFile, run_dir: RunDir, ranks: Ranks) -> None:
    """Supervised training, as any rank: there is no orchestrator to hear."""
    if not ranks.is_lead:
        channel = Follow(ranks)
        with _telling(channel):
            pulse = _pulse(config, channel)
            pulse.mark(LOADING, LONG_S)
            parts = sft.build_follower(config, run_dir, ranks, channel, pulse)
            channel.hello(parts.first_step)
            parts.learner.pulse.rest()
            sft.run(parts)
        channel.close()
        return
    lead = Lead(ranks) if ranks.size > 1 else None
    with _telling(lead):
        if lead is not None:
            lead.meet()
        pulse = _pulse(config, lead)
        pulse.mark(LOADING, LONG_S)
        parts = sft.build(config, run_dir, ranks, lead, pulse)
        parts.learner.pulse.rest()
        if lead is not None:
            lead.gather(parts.first_step)
        sft.run(parts)


@contextmanager
def _telling(channel: Lead | Follow | None) -> Iterator[None]:
    """Tells the other ranks of a failure before it goes on: they may wait in a collective."""
    try:
        yield
    except BaseException as error:
        if channel is not None:
            channel.fail(f"{type(error).__name__}: {error}")
        raise
