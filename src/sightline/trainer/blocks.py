"""How a block computes: compiled, or forgetting its activations, with the same result."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from sightline.compute import attention
from sightline.families import Forward

MAX_GRAPHS = 64
"""Of one class of blocks."""


def num_compiled() -> int:
    """Graphs that this process has compiled so far.

    Blocks of one class share theirs: dynamo takes a module's parameters for inputs. A graph is
    compiled once for the first shape, and once more for any, when a second shape comes.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def wrap_blocks(forward: Forward, recompute: bool, backend: str) -> None:
    """Replaces the forward pass of each block, in place; parameters keep their names.

    Before sharding: what gathers a block's parameters stays around what is called here.
    """
    if backend:
        _allow_graphs()
        attention.register(opaque=True)
    for block in forward.blocks():
        call = block.forward
        if backend:
            call = torch.compile(call, backend=backend)
        if recompute:
            # To keep and set back the state of random numbers costs the host time, for each block.
            call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=_draws(block))
        block.forward = call


def _allow_graphs() -> None:
    """A block has a graph for its first shape and one for all others, times packs and trees, times
    with and without gradients: more than the compiler allows by default, after which it does not
    compile. `compilations` in the metrics says how many there were."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)


def _draws(block: torch.nn.Module) -> bool:
    """Whether it would compute something else the second time."""
    return any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in block.modules())
