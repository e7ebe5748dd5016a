"""The trainer's device mesh: its axes, and a single rank without a process group."""

from __future__ import annotations

import pytest

from sightline.errors import ConfigError
from sightline.trainer.parallel_dims import ParallelDims


@pytest.mark.parametrize("axis", ["context", "tensor", "expert"])
def test_an_axis_without_an_implementation_is_refused(axis: str) -> None:
    assert ParallelDims(data=4).axes == {"data": 4, "context": 1, "tensor": 1, "expert": 1}
    with pytest.raises(ConfigError, match=f"no {axis} parallelism"):
        ParallelDims(**{axis: 2})


def test_ranks_split_work_without_overlap() -> None:
    shares = [ParallelDims(rank, data=3).split(range(7)) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(7))


def test_a_single_rank_needs_no_process_group() -> None:
    dims = ParallelDims()
    assert dims.sum({"tokens": 2.0}) == {"tokens": 2.0}
    assert (dims.max(3), dims.gather_list(["a"]), dims.gather_to_lead(5)) == (3, ["a"], [5])
