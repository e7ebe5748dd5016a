"""Page-locked memory and copies that do not wait, on a real device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sightline.families.device_copy import allocate_pinned, copy_to_device

pytestmark = pytest.mark.gpu


def test_patches_lie_in_page_locked_memory_and_arrive() -> None:
    device = torch.device("cuda")
    held = fill(np.random.default_rng(0).integers(0, 256, (7001, 768)), device)
    assert torch.from_numpy(held).is_pinned()
    assert np.array_equal(copy_to_device(held, device).cpu().numpy(), held)


def fill(values: np.ndarray | int, device: torch.device) -> np.ndarray:
    held = allocate_pinned(*(np.shape(values) or (4096, 768)), device)
    held[:] = values
    return held


def test_memory_is_not_used_again_while_a_copy_reads_it() -> None:
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        first = copy_to_device(fill(1, device), device)
        for value in range(2, 8):
            fill(value, device)
        assert bool((first == 1).all())
