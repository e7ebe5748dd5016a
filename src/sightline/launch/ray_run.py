"""Run a command on a node of a Ray cluster: `python -m sightline.launch.ray_run -- COMMAND`.

    launcher --stdin--> this command --calls--> an actor with the resources --stdin--> COMMAND
             <--output, exit code--            <--output, exit code--

The launcher holds one placement group with a bundle for each process. If a node is lost, this
command ends, and the launcher restarts it on another node. COMMAND ends when its standard input
closes: when the actor ends, or at most LEASE_S after this command's last call.
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
from sightline.launch.process_spec import ProcessSpec

LEASE_S = 30.0
"""A command ends if its caller is silent for this long. Its node may be cut off, and its
replacement may be running elsewhere."""
POLL_S = 0.5
CONNECT_TIMEOUT_S = 10.0
PLACE_TIMEOUT_S = 600.0
SAY_AFTER_S = 5.0
"""A run that waits longer than this for resources prints a message."""
START_FIX = "start one with `ray start --head`, or set RAY_ADDRESS to HOST:PORT of its head"
FORWARDED = ("_NUM_THREADS", "TOKENIZERS_PARALLELISM", "OMP_WAIT_POLICY", "MALLOC_ARENA_MAX")
"""Suffixes of variables that are passed to COMMAND. All others come from its node."""


def build_command_prefix(run_id: str, bundle: int) -> list[str]:
    """Return the command prefix that runs a command in a bundle of the run's placement group."""
    module = [sys.executable, "-m", "sightline.launch.ray_run"]
    return [*module, "--run", run_id, "--bundle", str(bundle), "--"]


class Command:
    """An actor that runs a command on its node while a caller polls it."""

    def __init__(self, command: list[str], variables: Mapping[str, str]) -> None:
        self._output: queue.Queue[bytes] = queue.Queue()
        self._polled_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._fence, daemon=True).start()

    def write(self, data: bytes) -> None:
        """Write `data` to the command's input. Empty data closes the input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the command has ended or closed its input
            self._process.stdin.write(data)
            self._process.stdin.flush()
        if not data:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def poll(self) -> tuple[bytes, int | None]:
        """Return the command's new output, and its exit code once there is no more output."""
        self._polled_at = time.monotonic()
        exit_code, output = self._process.poll(), b""
        with contextlib.suppress(queue.Empty):
            output = self._output.get(timeout=POLL_S)
            while True:
                output += self._output.get_nowait()
        return output, None if output else exit_code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while data := os.read(output.fileno(), 1 << 16):
                self._output.put(data)

    def _fence(self) -> None:
        while self._process.poll() is None:
            time.sleep(POLL_S)
            if time.monotonic() - self._polled_at > LEASE_S:
                self.kill()


def check_address(address: str) -> None:
    """Raise if no cluster answers. Ray itself would retry for minutes and ignore signals."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():  # "auto": Ray fails at once
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error}", START_FIX) from error


def connect(run_id: str) -> Any:
    """Connect to the cluster at RAY_ADDRESS, or to the one that this machine belongs to."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    check_address(address)
    import ray

    if not ray.is_initialized():
        print(f"connecting to the Ray cluster at {address}", file=sys.stderr, flush=True)
        try:
            ray.init(address, namespace=run_id, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError) as error:  # RuntimeError: another version
            raise ConfigError(f"no Ray cluster is at {address}: {error}", START_FIX) from error
    return ray


@contextlib.contextmanager
def reserve(run_id: str, placed: Sequence[ProcessSpec]) -> Iterator[None]:
    """Reserve resources on the cluster for all processes of a run."""
    from ray.util import placement_group, remove_placement_group

    ray = connect(run_id)
    requests = [
        {"CPU": r.cpus, "GPU": r.gpus, "memory": r.memory_gb * 1e9}
        for r in (spec.resources for spec in placed)
    ]
    bundles = [{name: value for name, value in each.items() if value} for each in requests]
    group = placement_group(bundles, name=run_id)
    try:
        if not group.wait(SAY_AFTER_S):
            room = f"the run requests {bundles}, the cluster has {ray.cluster_resources()}"
            text = f"waiting up to {PLACE_TIMEOUT_S:.0f} s for room for the run: {room}"
            print(text, file=sys.stderr, flush=True)
            if not group.wait(PLACE_TIMEOUT_S):
                problem = f"the Ray cluster had no room within {PLACE_TIMEOUT_S:.0f} s: {room}"
                raise ConfigError(problem, "add nodes, or lower [launch.resources]")
        yield
    finally:
        remove_placement_group(group)
        ray.shutdown()


def run(run_id: str, bundle: int, command: list[str]) -> int:
    """Run the command in a bundle with this process's standard input, and return its exit code, or
    1 if its node was lost."""
    ray = connect(run_id)
    from ray.exceptions import RayError
    from ray.util import get_placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_placement_group(run_id)
    resources = placement_group_table(group)["bundles"][bundle]
    variables = {key: value for key, value in os.environ.items() if key.endswith(FORWARDED)}
    options = {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": resources.get("memory"),
        "max_concurrency": 4,
    }
    actor = ray.remote(Command).options(**options).remote(command, variables)

    def feed() -> None:
        with contextlib.suppress(RayError):
            while data := os.read(sys.stdin.fileno(), 1 << 16):
                ray.get(actor.write.remote(data))
            ray.get(actor.write.remote(b""))

    threading.Thread(target=feed, daemon=True).start()
    polled_at = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            output, exit_code = ray.get(actor.poll.remote())
            polled_at = began
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()
            if exit_code is not None:
                return int(exit_code) if exit_code >= 0 else 128 - int(exit_code)
    except RayError as error:
        print(f"{error}\nthe process was lost with its node ({type(error).__name__})", flush=True)
        # No replacement may start while the lost command may still run.
        time.sleep(max(0.0, polled_at + LEASE_S + 2 * POLL_S - time.monotonic()))
        return 1
    finally:
        ray.kill(actor)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--bundle", type=int, required=True)
    parser.add_argument("words", nargs="+", metavar="COMMAND")
    args = parser.parse_args()
    try:
        exit_code = run(args.run, args.bundle, args.words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)  # threads may still wait for the cluster


if __name__ == "__main__":
    main()
