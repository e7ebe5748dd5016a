"""Settings that were renamed or removed since version 0.1.0.

A run file with an old name raises an error that gives the new name. The `config.toml` in run
directories of earlier versions is still readable: `translate_old_names` translates it.
"""

from __future__ import annotations

import copy
from typing import Any

RENAMED = {
    "orchestrator.advantage": "algorithm.advantage",
    "orchestrator.advantage_args": "algorithm.advantage_args",
    "orchestrator.credit": "algorithm.credit",
    "trainer.kl_coef": "algorithm.kl_coef",
    "trainer.loss": "algorithm.loss",
    "trainer.loss_aggregation": "algorithm.aggregation",
    "trainer.loss_aggregation_args": "algorithm.aggregation_args",
    "trainer.loss_args": "algorithm.loss_args",
    "trainer.measure_entropy": "algorithm.measure_entropy",
}
"""New name of each renamed setting, by its old `section.key`."""

OF_OTHER_FRAMEWORKS = {
    "beta": "algorithm.kl_coef",
    "clip_ratio": "algorithm.loss_args.clip_low",
    "epsilon": "algorithm.loss_args.clip_low",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "kl_loss_coef": "algorithm.kl_coef",
    "learning_rate": "trainer.lr",
    "lr_scheduler_type": "trainer.lr_schedule",
    "max_async_level": "orchestrator.max_lag",
    "max_completion_length": "rollout.max_tokens",
    "max_steps": "run.steps",
    "num_generations": "orchestrator.group_size",
    "rollouts_per_example": "orchestrator.group_size",
    "save_steps": "trainer.checkpoint_every",
}
"""Setting names in TRL, verl and prime-rl, in any section, and their names in Sightline."""
REMOVED = {
    "inference.inline_images": 'remove it: the engine "stock_vllm" was removed. Serve with engine '
    '= "vllm"',
    "logging.otel": "remove it: OpenTelemetry spans are no longer exported",
    "media.allow_unverified_pixels": "remove it: every engine reports the digests of its pixels",
    "media.on_bad_image": 'remove it. Instead of "stop", set [media] max_bad_fraction = 0',
    "model.number_images": 'remove it: write "Picture 1: " into the messages if they need numbers',
    "rollout.max_in_flight_mb": "limit the number of rollouts instead: [rollout] max_in_flight",
    "trainer.micro_batch_cost_model": "remove it: ranks are balanced by counting the model's "
    "operations",
}
"""Removed settings with their fixes."""


def translate_old_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a stored `config.toml` under the current names."""
    values = copy.deepcopy(values)
    for old in (*RENAMED, *REMOVED):
        section, key = old.split(".")
        if not isinstance(table := values.get(section), dict) or key not in table:
            continue
        value = table.pop(key)
        if old in RENAMED:
            section, key = RENAMED[old].split(".")
            target = values.setdefault(section, {})
            if isinstance(target, dict):  # validation refuses a plain value here
                target.setdefault(key, value)
    return values


def spell_setting(names: list[str]) -> str:
    """Format a setting as `[section] key`."""
    return f"[{names[0]}]" if len(names) == 1 else f"[{'.'.join(names[:-1])}] {names[-1]}"
