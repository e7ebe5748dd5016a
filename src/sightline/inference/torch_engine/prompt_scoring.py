"""Logprobs of the prompts' own tokens, for requests that ask for them.

They are those of the distribution that a sampled token would come from: banned ids leave the
softmax, then the temperature divides (1 where it is 0). Top-k, top-p and min-p have no part.
"""

from __future__ import annotations

import numpy as np
import torch

from sightline.inference.torch_engine.model_runner import ModelRunner
from sightline.inference.torch_engine.request import TorchRequest
from sightline.inference.torch_engine.row_table import RowTable
from sightline.inference.torch_engine.step_plan import StepPlan


def score_prompts(
    runner: ModelRunner,
    plan: StepPlan,
    hidden: torch.Tensor,
    table: RowTable,
    running: dict[int, TorchRequest],
) -> None:
    """Fills in what this step has computed of the prompts. A token predicts the next one."""
    for i in np.flatnonzero(plan.starts < table.prompt_length[plan.rows]).tolist():
        row = int(plan.rows[i])
        request = running[row]
        if request.params.prompt_logprobs is None:
            continue
        size, start = len(request.prompt), int(plan.starts[i])
        if request.prompt_logprobs is None:
            request.prompt_logprobs = np.full(size, np.nan, dtype=np.float32)
        count = min(int(plan.ends[i]), size - 1) - start
        if count <= 0:
            continue
        at = int(plan.offsets[i])
        following = table.tokens[row, start + 1 : start + 1 + count]
        request.prompt_logprobs[start + 1 : start + 1 + count] = runner.logprobs(
            hidden[at : at + count],
            following,
            request.params.temperature or 1.0,
            request.params.banned_token_ids,
        )
