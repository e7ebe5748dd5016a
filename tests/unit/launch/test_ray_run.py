"""A command on a node of a Ray cluster, without the cluster: what the actor does. `make
test-launchers` has it on a real one."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from sightline.errors import ConfigError
from sightline.launch import ray_run
from sightline.launch.ray_run import Command

AnyCommand = TypeVar("AnyCommand", bound=Command)

ECHO = "import sys; [print(line, end='', flush=True) for line in sys.stdin]; sys.exit(3)"


def wait(command: Command, until: Callable[[bytes, int | None], bool]) -> tuple[bytes, int | None]:
    log, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        more, exit_code = command.poll()
        log += more
        if until(log, exit_code):
            return log, exit_code
    raise AssertionError(f"it said {log!r}")


@contextmanager
def ended(command: AnyCommand) -> Iterator[AnyCommand]:
    """The command, which is killed at the end."""
    yield command
    command.kill()
    command._process.wait()
    command.write(b"")


def test_command_receives_its_input_and_ends() -> None:
    with ended(Command([sys.executable, "-c", ECHO], {})) as command:
        command.write(b"secret\n")
        assert wait(command, lambda said, code: said == b"secret\n")[1] is None
        command.write(b"")
        assert wait(command, lambda said, code: code is not None) == (b"", 3)


def test_unpolled_command_is_killed() -> None:
    class Cut(Command):
        """The caller has not called for a long time."""

        def cut_off(self) -> None:
            self._polled_at -= 2 * ray_run.LEASE_S

    with ended(Cut([sys.executable, "-c", "import time; time.sleep(60)"], {})) as command:
        command.cut_off()
        assert command._process.wait(30) == -9


def test_unreachable_ray_cluster_is_refused_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {nobody}") as caught:
        ray_run.connect("run")
    assert "RAY_ADDRESS" in caught.value.fix
    ray_run.check_address("auto")
