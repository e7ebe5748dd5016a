"""Machines on one: network namespaces, joined by a router that delays, loses and cuts off.

Every namespace has a TUN device whose packets this process carries. Faults therefore happen to
packets, as on a wire, and no layer above them is notified.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

TUN = Path("/dev/net/tun")
MTU = 9000
_SET_NAME, _IS_TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


class Network:
    """A router between machines called a, b and so on."""

    def __init__(self, names: str, seed: int = 0) -> None:
        self.latency_s = self.loss = 0.0
        self.cut_off: set[str] = set()
        """Machines that are disconnected."""
        self.num_carried = self.num_lost = 0
        self._rng = random.Random(seed)
        self._names = {name: f"sightline-{os.getpid()}-{name}" for name in names}
        self._subnet = f"10.77.{os.getpid() % 256}"
        self._devices: dict[str, int] = {}
        self._late: list[tuple[float, int, str, bytes]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True, name="network")

    def address(self, name: str) -> str:
        return f"{self._subnet}.{1 + list(self._names).index(name)}"

    def enter(self, name: str, *hidden: Path) -> list[str]:
        """Return the words that run a command on a machine that lacks the folders `hidden`."""
        mounts = " && ".join(f"mount -t tmpfs none {path}" for path in hidden)
        script = f'{mounts or "true"} && cd /tmp && exec "$@"'
        namespace = self._names[name]
        return ["ip", "netns", "exec", namespace, "unshare", "-m", "sh", "-c", script, "sh"]

    def __enter__(self) -> Network:
        try:
            for name, namespace in self._names.items():
                self._add_machine(name, namespace)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove_namespaces()
            pytest.skip(f"needs the right to make network namespaces ({error})")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        for device in self._devices.values():
            os.close(device)
        self._remove_namespaces()

    def _add_machine(self, name: str, namespace: str) -> None:
        device = f"sl{os.getpid()}{name}"[:15]
        handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, _SET_NAME, struct.pack("16sH", device.encode(), _IS_TUN_WITHOUT_HEADER))
        self._devices[name] = handle
        _call("ip", "netns", "add", namespace)
        _call("ip", "link", "set", device, "netns", namespace)
        within = ("ip", "netns", "exec", namespace, "ip")
        _call(*within, "link", "set", "lo", "up")
        _call(*within, "address", "add", f"{self.address(name)}/24", "dev", device)
        _call(*within, "link", "set", device, "mtu", str(MTU), "up")

    def _remove_namespaces(self) -> None:
        for namespace in self._names.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def _carry(self) -> None:
        by_address = {self.address(name): name for name in self._names}
        machines = {handle: name for name, handle in self._devices.items()}
        number = 0
        while not self._is_over.is_set():
            wait_s = (
                min(0.05, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 0.05
            )
            for handle in select.select(list(machines), [], [], wait_s)[0]:
                packet = os.read(handle, 1 << 16)
                source = machines[handle]
                target = by_address.get(".".join(map(str, packet[16:20])), "")
                if not target or {source, target} & self.cut_off or self._rng.random() < self.loss:
                    self.num_lost += bool(target)
                    continue
                number += 1
                due = time.monotonic() + self.latency_s
                heapq.heappush(self._late, (due, number, target, packet))
            while self._late and self._late[0][0] <= time.monotonic():
                target, packet = heapq.heappop(self._late)[2:]
                self.num_carried += 1
                try:
                    os.write(self._devices[target], packet)
                except OSError:
                    self.num_lost += 1


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def run_on(words: Sequence[str], log: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, text=True, **options
        )  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
