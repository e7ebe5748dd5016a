"""Pinned memory and asynchronous copies, on a real device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sightline.compute.tensor_file import write_tensors
from sightline.families.device_copy import allocate_rows, copy_to_device, move_to_device

pytestmark = pytest.mark.gpu


def test_patches_are_copied_from_page_locked_memory() -> None:
    device = torch.device("cuda")
    tensor = fill(np.random.default_rng(0).integers(0, 256, (7001, 768)), device)
    assert torch.from_numpy(tensor).is_pinned()
    assert np.array_equal(copy_to_device(tensor, device).cpu().numpy(), tensor)


def fill(values: np.ndarray | int, device: torch.device) -> np.ndarray:
    held = allocate_rows(*(np.shape(values) or (4096, 768)), device)
    held[:] = values
    return held


def test_memory_is_not_reused_during_a_copy() -> None:
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        first = copy_to_device(fill(1, device), device)
        for value in range(2, 8):
            fill(value, device)
        assert bool((first == 1).all())


def test_model_and_its_file_are_copied_whole_through_page_locked_memory(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4099, 4099), nn.BatchNorm1d(3))  # more than a piece
    model.append(model[0])  # tied
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    move_to_device(model, torch.device("cuda"))
    assert model[0].weight is model[2].weight
    state_dict = model.state_dict()
    assert all(x.is_cuda and x.cpu().equal(wanted[name]) for name, x in state_dict.items())
    write_tensors(tmp_path / "file", dict(model.named_parameters()), dtype=torch.bfloat16)
    for name, tensor in load_file(tmp_path / "file").items():
        assert tensor.equal(wanted[name].bfloat16())
