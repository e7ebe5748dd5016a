"""The trainer as a process: connects, says that it is ready, and runs the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sightline.config import RunFile, SftFile
from sightline.errors import WireError
from sightline.monitor import RunDir
from sightline.trainer import loop, sft
from sightline.trainer.build import build, build_follower
from sightline.trainer.ranks import Follow, Lead, Ranks
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.control import Announce, Control, Finish, Quit, Ready

NAME = "trainer"


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
        parts = build(config, run_dir, announcements, send, ranks, lead)
        if lead is not None:
            lead.gather(parts.first_step)
        send(Ready(NAME, parts.first_step))
        if _publishes_first(config, parts):
            parts.keeper.publish_again(parts.first_step)
        loop.run(parts)
    spoke.close()


def follow(config: RunFile, run_dir: RunDir, ranks: Ranks) -> None:
    """Any other rank: it hears rank 0 alone."""
    channel = Follow(ranks)
    with _telling(channel):
        parts = build_follower(config, run_dir, ranks, channel)
        channel.hello(parts.first_step)
        if _publishes_first(config, parts):
            parts.keeper.publish_again(parts.first_step)
        loop.run(parts)
    channel.close()


def _publishes_first(config: RunFile, parts: loop.Parts) -> bool:
    """Servers that the run starts hold its checkpoint; others hold whatever they hold."""
    return parts.first_step > 0 or bool(config.inference.servers)


def imitate(config: SftFile, run_dir: RunDir, ranks: Ranks) -> None:
    """Supervised training, as any rank: there is no orchestrator to hear."""
    if not ranks.is_lead:
        channel = Follow(ranks)
        with _telling(channel):
            parts = sft.build_follower(config, run_dir, ranks, channel)
            channel.hello(parts.first_step)
            sft.run(parts)
        channel.close()
        return
    lead = Lead(ranks) if ranks.size > 1 else None
    with _telling(lead):
        parts = sft.build(config, run_dir, ranks, lead)
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
