"""The orchestrator's process: the run's lease on its images, and their disk space."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sightline.errors import StoreFull
from sightline.media import MediaStore
from sightline.media.files import LEASE_S
from sightline.orchestrator.process import _keep_checking_store

RUN = "0123abcd"


def test_a_run_renews_its_lease_on_images_until_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lease, gc removes the images of rollouts in progress."""
    store, lease = MediaStore(tmp_path, reserve_bytes=0), tmp_path / ".leases" / RUN
    pauses, renewals = list[float](), list[bool]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if lease.exists():
            renewals.append(lease.stat().st_mtime > 1000)
            os.utime(lease, (1000, 1000))
        if len(pauses) == 3:
            store.reserve_bytes = 2**62
        assert len(pauses) < 4, "the disk was not checked"

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(StoreFull):
        asyncio.run(_keep_checking_store(store, RUN))
    assert renewals == [True, True] and max(pauses) < LEASE_S / 2
