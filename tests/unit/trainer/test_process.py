"""Of several things that went wrong in the ranks of a trainer, the one that caused the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist

from sightline.trainer.background_task import BackgroundTask
from sightline.trainer.process import find_cause, is_broken_collective


def fail() -> None:
    raise OSError("no room")


def test_what_went_wrong_beside_the_loop_is_why_the_loop_failed() -> None:
    tasks = [BackgroundTask("checkpoint"), BackgroundTask("publish")]
    components: Any = SimpleNamespace(run_writer=SimpleNamespace(background_tasks=tasks))
    broken = RuntimeError("a collective broke")
    assert find_cause(broken, components) is broken and find_cause(broken, None) is broken
    tasks[1].start("publishing", fail)
    with pytest.raises(OSError, match="no room"):
        tasks[1].wait()
    assert str(find_cause(broken, components)) == "no room"


def test_a_collective_that_breaks_because_another_rank_is_gone_is_told_from_a_fault() -> None:
    store, kind = dist.HashStore(), cast(Any, dist.ProcessGroupGloo)
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        groups[rank] = kind(store, rank, 2, options)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
    del groups[1]  # as the end of its process does
    with pytest.raises(RuntimeError) as found:
        groups[0].barrier().wait()
    assert is_broken_collective(found.value), str(found.value)
    assert not is_broken_collective(RuntimeError("a fault in the forward pass"))
    assert not is_broken_collective(torch.OutOfMemoryError("CUDA out of memory"))
