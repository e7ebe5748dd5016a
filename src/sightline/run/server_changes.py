"""Servers that the user added to or removed from a run, as a file in the run directory.

    sightline servers --writes--> servers.json --read by--> orchestrator, launcher

The file is kept when the run's processes end. It is ignored once `[inference] servers` in the run
file has changed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from typing import Literal

import msgspec

from sightline.regular_file import open_file
from sightline.run.run_dir import RunDir
from sightline.wire.file import add_checksum, read_checked, write_atomic

SERVE: Literal["serve"] = "serve"
DRAIN: Literal["drain"] = "drain"
REMOVE: Literal["remove"] = "remove"
Wanted = Literal["serve", "drain", "remove"]


class ServerChanges(msgspec.Struct, forbid_unknown_fields=True):
    base: tuple[str, ...] = ()
    """The `[inference] servers` to which the changes apply."""
    servers: dict[str, Wanted] = {}
    """The wanted state of each server, by address."""


def list_wanted(run_dir: RunDir, base: Sequence[str]) -> dict[str, Wanted]:
    """Return the wanted state of each server, for a run file with the servers `base`."""
    states: dict[str, Wanted] = dict.fromkeys(base, SERVE)
    if run_dir.servers.exists():
        fix = "remove it. The run then uses the servers of its run file"
        changes = read_checked(run_dir.servers, ServerChanges, fix)
        if changes.base == tuple(base):
            states |= changes.servers
    return states


def change_server(run_dir: RunDir, base: Sequence[str], url: str, wanted: Wanted) -> None:
    """Record that `url` should serve, drain or be removed."""
    with open_file(run_dir.id_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        servers = list_wanted(run_dir, base) | {url: wanted}
        known = {name: state for name, state in servers.items() if state != REMOVE or name in base}
        data = msgspec.json.encode(ServerChanges(tuple(base), known))
        write_atomic(run_dir.servers, add_checksum(data))
