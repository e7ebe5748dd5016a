"""How a block computes: compiled, or forgetting its activations, with the same result."""

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
"""Graphs that the compiler may make of one class of blocks."""


def count_compiled_graphs() -> int:
    """Graphs that this process has compiled so far.

    Blocks of one class share theirs: dynamo takes a module's parameters for inputs. A graph is
    compiled once for the first shape, and once more for any, when a second shape comes.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def import_compiler(backend: str) -> None:
    """Imports what compiles; for inductor that takes seconds."""
    if backend == "inductor":
        import_module("torch._inductor.compile_fx")


def end_compile_workers() -> None:
    """End the processes that inductor keeps for further graphs, in a background thread.

    Otherwise this process would wait for them for seconds when it exits.
    """
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        Thread(target=compiler.shutdown_compile_workers).start()


def wrap_blocks(forward: Forward, recompute: bool, backend: str, exact: bool = False) -> None:
    """Replaces the forward pass of each block, in place; parameters keep their names.

    Of an `exact` model nothing but the gradients of the formulas between its matrices is compiled:
    what is computed forward is what a sampler computes.

    Called before sharding: what gathers a block's parameters stays around what is called here.
    With a `backend` it changes the whole process, for good: attention becomes one operation that
    compilers do not look into, and more graphs of a function are allowed.
    """
    if backend:
        from torch._dynamo import config

        # A block has a graph for its first shape and one for all others, times packs and trees,
        # times with and without gradients: more than the compiler allows by default, after which
        # it does not compile. `compilations` in the metrics says how many there were.
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
        # To keep and set back the state of random numbers costs the host time, for each block.
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=_has_dropout(block))
        broken = partial(again, broken)
        kind = cast(Hashable, type(block))
        single = (
            partial(_compile_when_called(_build_recompute(kind), backend), block)
            if backend
            else broken
        )
    return partial(_forward_by_pattern, single, broken) if backend else broken


def _compile_when_called(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """To compile imports the compiler: a run that starts does not wait for that."""

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
    """A block that is one graph is computed again inside of its backward graph, which costs the
    host nothing; one that is broken at its attention, as it is."""
    graph_options = attention.find_graph_options(hidden, options)
    return (
        broken(hidden, *args, **options)
        if graph_options is None
        else single(hidden, *args, **graph_options)
    )


@cache
def _build_recompute(block_type: Any) -> Callable[..., Any]:
    """A function for each class of blocks, with a code object of its own.

    The compiler counts graphs, and learns which shapes vary, by code: with one for all classes one
    more graph is compiled, and on an H200 a step takes as long (945 ms against 949).
    """

    def recompute(block: torch.nn.Module, *args: Any, **options: Any) -> Any:
        return checkpoint(block_type.forward, block, *args, use_reentrant=False, **options)

    code = recompute.__code__.replace(co_name=f"recompute_{block_type.__name__}")
    return FunctionType(code, recompute.__globals__, code.co_name, None, recompute.__closure__)


def _has_dropout(block: torch.nn.Module) -> bool:
    """Return whether the block computes something else the second time."""
    return any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in block.modules())
