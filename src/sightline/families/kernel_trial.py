"""Try a kernel in the middle of a run, before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def take_trial_gradients() -> Iterator[None]:
    """Enable gradients inside, whatever the state outside.

    An engine runs without gradients, and checkpointed blocks count the tensors that are saved.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        yield
