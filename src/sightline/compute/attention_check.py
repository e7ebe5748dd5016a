"""Whether a kernel can be used here: tried on a few tokens, against another that can.

Letters: T tokens, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(T, N, D) of q (T, N, D) and k, v (T, N or fewer, D)."""


def is_equivalent(
    one: AttentionFunction,
    other: AttentionFunction,
    tokens: int,
    heads: tuple[int, int],
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Whether `one` gives the outputs and gradients of `other`; not so where it raises.

    `heads` are those of queries, and those of keys and values.
    """
    numbers = (heads[0], heads[1], heads[1])
    # Where an engine calls, no gradients are taken; where activations are computed again, what is
    # saved for them is counted. Neither is to see this.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
    ):
        # No random numbers: those of the run are to stay as they are.
        angles = (torch.arange(tokens * num * width, device=device) for num in numbers)
        drawn = [x.sin().view(tokens, -1, width).to(dtype) for x in angles]
        found = []
        for attend in (one, other):
            inputs = [x.detach().clone().requires_grad_() for x in drawn]
            try:
                out = attend(*inputs)
                out.float().square().sum().backward()
            except (RuntimeError, ValueError, TypeError):
                return False
            found.append([out.detach(), *(x.grad for x in inputs)])
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    return all(
        x is not None
        and y is not None
        and x.shape == y.shape
        and float((x - y).float().norm()) <= bound * float(y.float().norm())
        for x, y in zip(*found, strict=True)
    )


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
