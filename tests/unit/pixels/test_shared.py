"""Patches laid by one process and mapped by others: once made, sealed, bounded, gone with it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sightline.pixels import open_shared_patches, share_patches
from sightline.wire.rank_messages import SharedPatches

LIMIT = 1 << 20


def stacks() -> list[np.ndarray | None]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (n, 48), dtype=np.uint8) if n else None for n in (5, 0, 9)]


def test_what_is_opened_is_what_was_laid_and_outlasts_it() -> None:
    made = stacks()
    with share_patches(made, LIMIT) as laid:
        found = open_shared_patches(laid)
    assert found[1] is None
    for ours, theirs in ((found[0], made[0]), (found[2], made[2])):
        assert ours is not None and np.array_equal(ours, theirs)
    assert open_shared_patches(laid) == []


def test_nobody_can_change_what_was_laid() -> None:
    with share_patches(stacks(), LIMIT) as laid:
        assert laid is not None
        [first, _, _] = open_shared_patches(laid)
        assert first is not None
        with pytest.raises(ValueError, match="read-only"):
            first[0, 0] = 0
        with pytest.raises(PermissionError):
            os.pwrite(laid.fd, b"\0", 40)
        with pytest.raises(PermissionError):
            os.ftruncate(laid.fd, 8)


def test_what_exceeds_the_limit_is_left_out() -> None:
    with share_patches(stacks(), 5 * 48) as laid:
        assert laid is not None
        assert [place is not None for place in laid.places] == [True, False, False]
        assert os.fstat(laid.fd).st_size <= 5 * 48 + 32
    with share_patches([None, None], LIMIT) as nothing:
        assert nothing is None


def test_another_file_under_the_same_number_is_not_taken_for_it(tmp_path: Path) -> None:
    with share_patches(stacks(), LIMIT) as laid, share_patches(stacks(), LIMIT) as other:
        assert laid is not None and other is not None
        assert open_shared_patches(msgspec.structs.replace(laid, fd=other.fd)) == []
    (tmp_path / "short").write_bytes(b"x")
    with (tmp_path / "short").open("rb") as short:
        assert open_shared_patches(msgspec.structs.replace(laid, fd=short.fileno())) == []
    read_end, write_end = os.pipe()
    assert open_shared_patches(msgspec.structs.replace(laid, fd=read_end)) == []
    os.close(read_end), os.close(write_end)


MAKER = """
import sys, time
import msgspec, numpy as np
from sightline.pixels import share_patches
with share_patches([np.full((4096, 768), 7, dtype=np.uint8)], 1 << 30) as laid:
    print(msgspec.json.encode(laid).decode(), flush=True)
    time.sleep(600)
"""


def test_the_memory_of_a_killed_process_goes_with_its_last_user() -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    laid = msgspec.json.decode(maker.stdout.readline(), type=SharedPatches)
    [patches] = open_shared_patches(laid)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    assert patches is not None and patches.shape == (4096, 768) and (patches == 7).all()
    assert open_shared_patches(laid) == []
    assert "sightline-patches" in Path("/proc/self/maps").read_text()
    del patches
    gc.collect()
    assert "sightline-patches" not in Path("/proc/self/maps").read_text()
