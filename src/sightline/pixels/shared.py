"""Patches that the ranks of one machine share: made once, laid in memory, mapped by the others.

    rank 0 --lay--> sealed memory without a name       freed by the kernel with its last user
      gives: where it is (`SharedPatches`), in the share        rank r: opens it before it says `taken`

Nothing is written to a disk and nothing is left behind, however a process ends. Whoever finds the
memory gone, or is on another machine, makes the pixels itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from sightline.wire.rank_messages import PatchRange, SharedPatches

_TOKEN_BYTES = 32
# The bytes stay those that were digested: no process can change them any more.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# A descriptor by number may be anything by now: opening a pipe must not wait for its other end.
_OPENING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def share_patches(
    stacks: Sequence[np.ndarray | None], max_bytes: int
) -> Iterator[SharedPatches | None]:
    """Where the patches of each micro-batch lie, for as long as the context lasts; None: nowhere.

    Whoever opens them meanwhile keeps them. What goes beyond `max_bytes` is left out.
    """
    if not hasattr(os, "memfd_create") or all(stack is None for stack in stacks):
        yield None
        return
    fd = os.memfd_create("sightline-patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield _fill(fd, stacks, max_bytes)
    finally:
        os.close(fd)


def _fill(fd: int, stacks: Sequence[np.ndarray | None], max_bytes: int) -> SharedPatches | None:
    token = secrets.token_bytes(_TOKEN_BYTES)
    places: list[PatchRange | None] = [None] * len(stacks)
    try:
        end = _write(fd, token, 0)
        for i, stack in enumerate(stacks):
            if stack is None or end + stack.nbytes > max_bytes + _TOKEN_BYTES:
                continue
            places[i] = PatchRange(end, *stack.shape)
            end = _write(fd, np.ascontiguousarray(stack).data, end)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:  # no memory for it
        return None
    return SharedPatches(os.getpid(), fd, token.hex(), places)


def open_shared_patches(laid: SharedPatches | None) -> list[np.ndarray | None]:
    """The patches that another process of this machine has laid, in its memory; [] for none."""
    if laid is None:
        return []
    try:
        fd = os.open(f"/proc/{laid.pid}/fd/{laid.fd}", _OPENING)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return []
    finally:
        os.close(fd)
    # On another machine, or after a restart, the number may name another file.
    if memory[:_TOKEN_BYTES] != bytes.fromhex(laid.token):
        return []
    return [
        None
        if at is None
        else np.frombuffer(memory, np.uint8, at.rows * at.values, at.offset).reshape(at.rows, -1)
        for at in laid.places
    ]


def _write(fd: int, data: bytes | memoryview, at: int) -> int:
    rest = memoryview(data).cast("B")
    while len(rest):
        done = os.pwrite(fd, rest, at)
        at, rest = at + done, rest[done:]
    return at
