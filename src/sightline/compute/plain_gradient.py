"""The result of one function with the gradients of another that is equal up to rounding.

With `[model] exact`, sampler and trainer use the same kernels in the forward pass. Gradients need
not be exact, so they come from plain formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

_backend = ""
"""Backend of torch.compile for the gradients of formulas. Empty if not compiled."""


def compile_gradients(backend: str) -> None:
    """Compile the gradients of formulas in this process from now on."""
    global _backend
    _backend = backend


def call_exact(exact: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return the result of `exact`, with the gradients of `plain`.

    A `partial` of a function counts as a formula, which can be compiled.
    """
    if not torch.is_grad_enabled():
        return exact(*inputs)
    return _PlainGradient.apply(exact, plain, *inputs)


class _PlainGradient(torch.autograd.Function):
    """Recomputes `plain` in the backward pass to get its gradients."""

    @staticmethod
    def forward(ctx: Any, exact: Any, plain: Any, *inputs: Tensor) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plain, needs, inputs = ctx.plain, tuple(ctx.needs_input_grad[2:]), ctx.saved_tensors
        if _backend and isinstance(plain, partial):
            options = tuple(plain.keywords.items())
            computed = _compile_gradients(_backend, plain.func, options, needs)(inputs, grads)
        else:
            pairs = zip(inputs, needs, strict=True)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(need) for x, need in pairs]
                out = plain(*leaves)
            computed = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grads)
        gradients = iter(computed)
        return None, None, *(next(gradients) if need else None for need in needs)


@cache
def _compile_gradients(
    backend: str,
    function: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    needs: tuple[bool, ...],
) -> Callable[..., Sequence[Tensor]]:
    """Compile the gradients of `function` as one graph, without its unused result."""

    def compute(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
        def apply(*needed: Tensor) -> Any:
            left = iter(needed)
            arguments = [next(left) if need else x for x, need in zip(inputs, needs, strict=True)]
            return function(*arguments, **dict(options))

        needed = [x for x, need in zip(inputs, needs, strict=True) if need]
        pull: Callable[..., Sequence[Tensor]] = torch.func.vjp(apply, *needed)[1]
        return pull(grads[0] if len(grads) == 1 else grads)

    return torch.compile(compute, backend=backend)
