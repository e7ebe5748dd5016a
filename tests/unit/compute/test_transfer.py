from __future__ import annotations

import numpy as np
import torch

from sightline.families.device_copy import allocate_pinned, copy_to_device


def test_rows_arrive_as_they_are() -> None:
    held = allocate_pinned(7, 48, torch.device("cpu"))
    assert held.shape == (7, 48) and held.dtype == np.uint8
    assert held.flags.c_contiguous and held.flags.writeable
    held[:] = np.random.default_rng(0).integers(0, 256, held.shape)
    assert np.array_equal(copy_to_device(held, torch.device("cpu")).numpy(), held)
