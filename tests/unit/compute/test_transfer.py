from __future__ import annotations

import numpy as np
import torch

from sightline.families.device_copy import copy_to_device, stack_pinned


def test_parts_lie_one_after_the_other_and_arrive_as_they_are() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, (n, 48), dtype=np.uint8) for n in (3, 0, 4)]
    parts[0].setflags(write=False)
    held = stack_pinned(parts, torch.device("cpu"))
    assert held.dtype == np.uint8 and held.flags.c_contiguous and held.flags.writeable
    assert np.array_equal(held, np.concatenate(parts))
    assert np.array_equal(copy_to_device(held, torch.device("cpu")).numpy(), held)
