"""Runs a command on a node of a Ray cluster: `python -m sightline.launch.ray_run -- COMMAND`.

    launcher --stdin--> this command --calls--> an actor with the resources --stdin--> COMMAND
             <--output, exit code--            <--output, exit code--

The bundles of a run stand in one placement group, which the launcher holds. A node that is lost
ends this command, and the launcher starts it again, on another. COMMAND ends with its standard
input: it outlives neither the actor nor, by more than LEASE_S, the last call of this command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sightline.errors import ConfigError
from sightline.launch.process_spec import ProcessSpec, Resources

LEASE_S = 30.0
"""A command whose caller is silent for so long ends: its node may be cut off, and another started
in its place."""
POLL_S = 0.5
CONNECT_TIMEOUT_S = 10.0
PLACE_TIMEOUT_S = 600.0
SAY_AFTER_S = 5.0
"""For which a run waits for room before it says so."""
START_FIX = "start one with `ray start --head`, or set RAY_ADDRESS to HOST:PORT of its head"
FORWARDED = ("_NUM_THREADS", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY", "MALLOC_ARENA_MAX")
"""Ends of the names of variables that COMMAND has from here; all others are its node's."""


def build_command_prefix(name: str, asked: Resources, run_id: str, bundle: int) -> list[str]:
    """The words that run a command on the cluster, in a bundle of the run's placement group."""
    words = [sys.executable, "-m", "sightline.launch.ray_run", "--run", run_id, "--name", name]
    words += ["--bundle", str(bundle)]
    words += ["--cpus", str(asked.cpus), "--gpus", f"{asked.gpus:g}"]
    words += ["--memory-gb", f"{asked.memory_gb:g}"] if asked.memory_gb else []
    return [*words, "--"]


class Command:
    """An actor: a command on its node, for as long as somebody asks about it."""

    def __init__(self, words: list[str], variables: Mapping[str, str]) -> None:
        self._output: queue.Queue[bytes] = queue.Queue()
        self._asked = time.monotonic()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        threading.Thread(target=self._fence, daemon=True).start()

    def write(self, data: bytes) -> None:
        """Hands `data` to the command; none is the end of its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its input has
            self._process.stdin.write(data)
            self._process.stdin.flush()
        if not data:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def poll(self) -> tuple[bytes, int | None]:
        """What the command has said since it was last asked, and how it ended; what it started may
        hold its output open."""
        self._asked = time.monotonic()
        exit_code, said = self._process.poll(), b""
        with contextlib.suppress(queue.Empty):
            said = self._output.get(timeout=POLL_S)
            while True:
                said += self._output.get_nowait()
        return said, None if said else exit_code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the command, and all that it started."""
        self.kill()
        self._process.wait()
        self._reading.join()
        self.write(b"")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), 1 << 16):
                self._output.put(data)

    def _fence(self) -> None:
        while self._process.poll() is None:
            time.sleep(POLL_S)
            if time.monotonic() - self._asked > LEASE_S:
                self.kill()


def get_address() -> str:
    return os.environ.get("RAY_ADDRESS") or "auto"


def check_address(address: str) -> None:
    """Refuses a cluster that nobody is at: Ray itself would try for minutes, and hear no signal."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():  # "auto": Ray knows at once
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}", START_FIX) from error


def connect(run_id: str) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS, or the one that this machine is part of."""
    address = get_address()
    check_address(address)
    import ray

    if not ray.is_initialized():
        print(f"connecting to the Ray cluster at {address}", file=sys.stderr, flush=True)
        try:
            ray.init(address, namespace=run_id, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError) as error:  # RuntimeError: of another version
            raise ConfigError(f"no Ray cluster is at {address}: {error}", START_FIX) from error
    return ray


def build_bundle(asked: Resources) -> dict[str, float]:
    memory = {"memory": asked.memory_gb * 1e9} if asked.memory_gb else {}
    return {"CPU": asked.cpus, **({"GPU": asked.gpus} if asked.gpus else {}), **memory}


@contextlib.contextmanager
def reserve(run_id: str, placed: Sequence[ProcessSpec]) -> Iterator[None]:
    """Has room on the cluster for all processes of a run at once, while it lasts."""
    from ray.util import placement_group, remove_placement_group

    ray = connect(run_id)
    asked = [build_bundle(one.resources) for one in placed]
    group = placement_group(asked, name=run_id)
    try:
        if not group.wait(SAY_AFTER_S):
            room = f"it asks for {asked}, and the cluster has {ray.cluster_resources()}"
            words = f"waiting for room for the run, {PLACE_TIMEOUT_S:.0f} s at most: {room}"
            print(words, file=sys.stderr, flush=True)
            if not group.wait(PLACE_TIMEOUT_S):
                problem = f"the Ray cluster had no room within {PLACE_TIMEOUT_S:.0f} s: {room}"
                raise ConfigError(problem, "add nodes, or lower [launch.resources]")
        yield
    finally:
        remove_placement_group(group)
        ray.shutdown()


def run(run_id: str, name: str, bundle: int, asked: Resources, words: list[str]) -> int:
    """Runs the command on the cluster with the standard input of this process, and returns its exit
    code; 1 where its node was lost."""
    ray = connect(run_id)
    from ray.exceptions import RayError
    from ray.util import get_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "max_concurrency": 4}
    options |= {"memory": asked.memory_gb * 1e9} if asked.memory_gb else {}
    group = PlacementGroupSchedulingStrategy(get_placement_group(run_id), bundle)
    variables = {key: value for key, value in os.environ.items() if key.endswith(FORWARDED)}
    actor = (
        ray.remote(Command).options(scheduling_strategy=group, **options).remote(words, variables)
    )

    def feed() -> None:
        with contextlib.suppress(RayError):
            while data := os.read(sys.stdin.fileno(), 1 << 16):
                ray.get(actor.write.remote(data))
            ray.get(actor.write.remote(b""))

    threading.Thread(target=feed, daemon=True).start()
    asked_at = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            said, exit_code = ray.get(actor.poll.remote())
            asked_at = began
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            if exit_code is not None:
                return int(exit_code) if exit_code >= 0 else 128 - int(exit_code)
    except RayError as error:
        print(f"{error}\n{name} was lost with its node ({type(error).__name__})", flush=True)
        # Nobody is to be in its place while it may still run.
        time.sleep(max(0.0, asked_at + LEASE_S + 2 * POLL_S - time.monotonic()))
        return 1
    finally:
        ray.kill(actor)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--bundle", type=int, required=True)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0)
    parser.add_argument("--memory-gb", type=float, default=0)
    parser.add_argument("words", nargs="+", metavar="COMMAND")
    args = parser.parse_args()
    asked = Resources(args.cpus, args.gpus, args.memory_gb)
    try:
        exit_code = run(args.run, args.name, args.bundle, asked, args.words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # threads may still wait for the cluster


if __name__ == "__main__":
    main()
