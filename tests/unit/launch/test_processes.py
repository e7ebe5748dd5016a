"""The environment in which a run's processes start."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from sightline.compute.tcp_store import listen_store
from sightline.errors import ProcessFailed
from sightline.launch.processes import (
    Processes,
    ProcessSpec,
    TrainerWatchdog,
    reserve_port,
)
from sightline.run import RunDir
from sightline.run.machine import build_environ
from sightline.transport.zmq_channel import Hub

CAPS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def start_idle(processes: Processes, name: str) -> None:
    """Start a process that does nothing and does not end."""
    python = processes.run_dir.path / "python.sh"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep(600)' $@\n")
    python.chmod(0o755)
    processes.start(ProcessSpec(name, ["idle"], 1, python=str(python)))


def test_native_thread_pools_are_capped_before_a_process_starts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    processes = Processes(run_dir)
    start_idle(processes, "worker-0")
    try:
        folder = Path(f"/proc/{processes.list_pids()['worker-0']}")
        while b"sightline" not in (folder / "cmdline").read_bytes():
            time.sleep(0.01)  # forked, and not yet the program that it becomes
        parts = (folder / "environ").read_bytes().decode().split("\0")
        assert {f"{name}=1" for name in CAPS} <= set(parts) and "MALLOC_ARENA_MAX=2" in parts
    finally:
        processes.kill()


def test_thread_caps_equal_the_processs_threads() -> None:
    assert {build_environ(3)[name] for name in CAPS} == {"3"}


def test_reserved_port_is_not_given_to_other_sockets() -> None:
    here = "127.0.0.1"
    ports = [reserve_port(here, 0, "test") for _ in range(3)]
    # In the meantime, the system assigns other ports to listeners and connections.
    with socket.socket() as listener:
        listener.bind((here, 0))
        listener.listen()
        for _ in range(500):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind((here, 0))
                assert other.getsockname()[1] not in ports
            with socket.create_connection(listener.getsockname()) as connection:
                assert connection.getsockname()[1] not in ports
                listener.accept()[0].close()
    hub = Hub(f"tcp://{here}:{ports[0]}", "known to both")
    hub.close()
    store = listen_store(here, ports[1], timeout_s=30)
    store.set("key", "value")

    async def serve() -> None:
        server = await asyncio.start_server(lambda *_: None, here, ports[2])
        server.close()
        await server.wait_closed()

    asyncio.run(serve())


def test_stalled_trainer_heartbeat_ends_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    beat = run_dir.heartbeat("trainer")
    beat.touch()
    processes, now = Processes(run_dir), [0.0]
    trainers = TrainerWatchdog(processes, ["trainer"], 60.0, clock=lambda: now[0])

    def check_after(seconds: float) -> None:
        for _ in range(int(seconds)):
            now[0] += 1.0
            trainers.check()

    assert not beat.exists(), "one from before the run was resumed says nothing"
    start_idle(processes, "trainer")
    try:
        check_after(179)
        beat.touch()
        check_after(60)
        # The system clock steps two hours forward and back.
        for step_s in (7200, -7200):
            os.utime(beat, (time.time() + step_s, time.time() + step_s))
            check_after(60)
        # The launcher itself did not run for an hour.
        beat.touch()
        check_after(30)
        now[0] += 3600.0
        trainers.check()
        with pytest.raises(ProcessFailed, match="trainer gave no heartbeat for 61 s"):
            check_after(31)
    finally:
        processes.kill()
    trainers.check()  # one that has ended has another cause
