"""Where a kernel is tried in the middle of a run, before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def take_trial_gradients() -> Iterator[None]:
    """Takes gradients inside, whatever is outside: an engine takes none, and a block whose
    activations are computed again counts what is saved for them."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        yield
