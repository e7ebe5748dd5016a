"""Page-locked memory and copies that do not wait, on a real device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sightline.families.device_copy import copy_to_device, stack_pinned

pytestmark = pytest.mark.gpu


def test_patches_are_stacked_in_page_locked_memory_and_arrive() -> None:
    device = torch.device("cuda")
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, (n, 768), dtype=np.uint8) for n in (3000, 1, 4000)]
    held = stack_pinned(parts, device)
    assert torch.from_numpy(held).is_pinned()
    assert np.array_equal(copy_to_device(held, device).cpu().numpy(), np.concatenate(parts))


def test_memory_is_not_used_again_while_a_copy_reads_it() -> None:
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        first = copy_to_device(stack_pinned([np.full((4096, 768), 1, np.uint8)], device), device)
        for value in range(2, 8):
            stack_pinned([np.full((4096, 768), value, np.uint8)], device)
        assert bool((first == 1).all())
