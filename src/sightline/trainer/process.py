"""The trainer as a process: connects, says that it is ready, and runs the loop."""

from __future__ import annotations

from sightline.config import RunFile
from sightline.errors import WireError
from sightline.monitor import RunDir
from sightline.trainer import loop
from sightline.trainer.build import build
from sightline.transport.zmq_channel import Spoke
from sightline.wire import control
from sightline.wire.control import Announce, Control, Finish, Quit, Ready

NAME = "trainer"


def main(config: RunFile, run_dir: RunDir, hub: str) -> None:
    spoke = Spoke(hub, NAME)

    def send(message: Control) -> None:
        spoke.send(control.encode(message))

    def announcements() -> Announce | None:
        data = spoke.receive()
        assert data is not None
        message = control.decode(data)
        if isinstance(message, (Finish, Quit)):
            return None
        if not isinstance(message, Announce):
            raise WireError(
                f"the trainer was sent a {type(message).__name__}", "this is a bug; report it"
            )
        return message

    parts = build(config, run_dir, announcements, send)
    if parts.first_step:
        parts.keeper.publish(parts.first_step)
    send(Ready(NAME, parts.first_step))
    if parts.first_step:
        parts.keeper.announce()
    loop.run(parts)
    spoke.close()
