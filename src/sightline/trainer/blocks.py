"""Compilation and activation checkpointing of model blocks. Neither changes the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import cache, partial
from importlib import import_module
from threading import Thread
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from sightline.compute import attention
from sightline.compute.plain_gradient import compile_gradients
from sightline.families import Forward

MAX_GRAPHS = 64
"""Maximum number of graphs that the compiler may build for one class of blocks."""


def count_compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled so far.

    Blocks of one class share graphs, because dynamo treats a module's parameters as inputs. A graph
    is compiled once for the first shape, and once more, for any shape, when a second one occurs.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def import_compiler(backend: str) -> None:
    """Import the compiler. For inductor this takes seconds."""
    if backend == "inductor":
        import_module("torch._inductor.compile_fx")


def end_compile_workers() -> None:
    """End the processes that inductor keeps for further graphs, in a background thread.

    Otherwise this process would wait for them for seconds when it exits.
    """
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        Thread(target=compiler.shutdown_compile_workers).start()


def wrap_blocks(forward: Forward, recompute: bool, backend: str, exact: bool = False) -> None:
    """Replace the forward pass of each block in place. Parameters keep their names.

    In an `exact` model, only the gradients of the operations between matrix products are compiled:
    the forward pass must match the sampler's.

    Call this before sharding, so that FSDP's gathering wraps the new forward pass. A `backend`
    changes the whole process permanently: attention becomes one operation that is opaque to the
    compiler, and the limit on graphs per function is raised.
    """
    if backend:
        from torch._dynamo import config

        # A block has a graph for its first shape and one for all others, times packs and trees,
        # times with and without gradients. That exceeds the compiler's default limit, beyond which
        # it stops compiling. The metric `compilations` counts the graphs.
        config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    if exact:
        compile_gradients(backend)
        backend = ""
    if backend:
        attention.register_attention(opaque=True)
    for block in forward.blocks():
        block.forward = _wrap_block(block, block.forward, recompute, backend)


def _wrap_block(
    block: Any, plain: Callable[..., Any], recompute: bool, backend: str
) -> Callable[..., Any]:
    single = broken = _compile_when_called(plain, backend) if backend else plain
    if recompute:
        # Nothing is random. Saving and restoring the random state would take host time.
        broken = partial(checkpoint, broken, use_reentrant=False, preserve_rng_state=False)
        kind = cast(Hashable, type(block))
        single = (
            partial(_compile_when_called(_build_recompute(kind), backend), block)
            if backend
            else broken
        )
    return partial(_forward_by_pattern, single, broken) if backend else broken


def _compile_when_called(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile `function` at its first call, so that startup does not import the compiler."""

    @cache
    def get_compiled() -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, backend=backend)
        return compiled

    return lambda *args, **options: get_compiled()(*args, **options)


def _forward_by_pattern(
    single: Callable[..., Any],
    broken: Callable[..., Any],
    hidden: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """Call `single` if the block is one graph, or `broken` if its attention breaks the graph.
    A single graph recomputes activations in its backward graph, without work for the host."""
    graph_options = attention.find_graph_options(hidden, options)
    return (
        broken(hidden, *args, **options)
        if graph_options is None
        else single(hidden, *args, **graph_options)
    )


@cache
def _build_recompute(block_type: Any) -> Callable[..., Any]:
    """Return a function for this class of blocks, with its own code object.

    The compiler counts graphs and detects varying shapes per code object. A shared one compiles one
    more graph, and takes as long per step (945 ms compared with 949 ms on an H200).
    """

    def recompute(block: torch.nn.Module, *args: Any, **options: Any) -> Any:
        return checkpoint(block_type.forward, block, *args, use_reentrant=False, **options)

    code = recompute.__code__.replace(co_name=f"recompute_{block_type.__name__}")
    return FunctionType(code, recompute.__globals__, code.co_name, None, recompute.__closure__)
