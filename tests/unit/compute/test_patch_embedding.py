"""A patch embedding as a matrix product equals the convolution, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sightline.compute.model import linearize_patch_embeddings

KINDS = {
    "two frames": (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (5, 3, 2, 4, 4)),
    "one frame, no bias": (nn.Conv2d(3, 8, 4, stride=4, bias=False), (5, 3, 4, 4)),
    "several patches at once": (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 12)),
    "overlapping": (nn.Conv2d(3, 8, 4, stride=2), (5, 3, 4, 4)),
    "padded": (nn.Conv2d(3, 8, 4, stride=4, padding=4), (5, 3, 4, 4)),
}


@pytest.mark.parametrize("name", KINDS)
def test_matmul_matches_convolution(name: str) -> None:
    module, shape = KINDS[name]
    names = list(dict(module.named_parameters()))
    torch.manual_seed(0)
    x = torch.randn(*shape)
    outputs = []
    for _ in range(2):
        own = x.clone().requires_grad_()
        module.zero_grad()
        out = module(own)
        out.square().sum().backward()
        outputs.append([out.detach(), own.grad, *(p.grad.clone() for p in module.parameters())])
        linearize_patch_embeddings(module)
    for convolved, multiplied in zip(*outputs, strict=True):
        torch.testing.assert_close(multiplied, convolved, rtol=1e-5, atol=1e-5)
    assert list(dict(module.named_parameters())) == names


def test_every_family_embeds_patches_by_matmul(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from sightline.compute.model import load_model
    from sightline.families import load_family
    from sightline.families.registry import write_tiny

    for name in ("qwen_vl", "kimi_k25", "glm_v"):
        path = tmp_path / name
        write_tiny(name, path, seed=0)
        forward = load_model(path, load_family(path), "cpu", "float32")
        smallest = forward.blank_image()
        assert smallest is not None
        with monkeypatch.context() as patched:
            for kind in ("conv2d", "conv3d"):
                patched.delattr(torch.nn.functional, kind)
            patches, grid = smallest
            forward.encode(patches, [grid])
