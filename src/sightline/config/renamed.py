"""Renamed and removed settings.

A run file with an old name is refused, and the error gives the new name. The `config.toml` in run
directories of earlier versions is still readable: `translate_old_names` translates it.
"""

from __future__ import annotations

import copy
from typing import Any

RENAMED = {
    "data.eval": "data.eval_fraction",
    "data.images": "data.images_column",
    "data.messages": "data.messages_column",
    "data.part": "data.split",
    "inference.max_len": "inference.max_model_len",
    "inference.max_rows": "inference.max_num_seqs",
    "inference.prefill_chunk": "inference.prefill_chunk_tokens",
    "inference.vllm_args": "inference.engine_args",
    "media.on_bad": "media.on_bad_image",
    "monitor.offline": "logging.wandb_offline",
    "monitor.samples_every": "logging.samples_every",
    "monitor.sinks": "logging.sinks",
    "orchestrator.advantage": "algorithm.advantage",
    "orchestrator.advantage_args": "algorithm.advantage_args",
    "orchestrator.credit": "algorithm.credit",
    "orchestrator.max_replaced": "orchestrator.max_resample_fraction",
    "orchestrator.probe_every": "orchestrator.diagnostics_every",
    "rollout.count_truncated": "rollout.keep_truncated",
    "rollout.hang_s": "rollout.worker_hang_timeout_s",
    "rollout.worker_max_gb": "rollout.worker_max_memory_gb",
    "sft.output": "sft.output_dir",
    "trainer.clip_high": "algorithm.loss_args.clip_high",
    "trainer.clip_low": "algorithm.loss_args.clip_low",
    "trainer.compile": "trainer.compile_backend",
    "trainer.entropy": "algorithm.measure_entropy",
    "trainer.grad_norm": "trainer.max_grad_norm",
    "trainer.importance_cap": "algorithm.loss_args.ratio_cap",
    "trainer.kl_coef": "algorithm.kl_coef",
    "trainer.loss": "algorithm.loss",
    "trainer.loss_aggregation": "algorithm.aggregation",
    "trainer.loss_aggregation_args": "algorithm.aggregation_args",
    "trainer.loss_args": "algorithm.loss_args",
    "trainer.measure_entropy": "algorithm.measure_entropy",
    "trainer.keep_every": "trainer.keep_checkpoints_every",
    "trainer.kl_weight": "algorithm.kl_coef",
    "trainer.loss_average": "algorithm.aggregation",
    "trainer.loss_constant": "algorithm.aggregation_args.divisor",
    "trainer.lr_end": "trainer.final_lr_fraction",
    "trainer.max_sequence": "trainer.max_sequence_tokens",
    "trainer.schedule": "trainer.lr_schedule",
    "trainer.stuck_after_s": "trainer.stall_timeout_s",
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
    "optim": "trainer.lr",
    "rollouts_per_example": "orchestrator.group_size",
    "save_steps": "trainer.checkpoint_every",
}
"""Setting names in TRL, verl and prime-rl, in any section, and their names in Sightline."""
COST_MODEL_FIX = "remove it: ranks are balanced by counting the model's operations"
INLINE_IMAGES_FIX = 'remove it: the engine "stock_vllm" was removed. Serve with engine = "vllm"'
NUMBER_IMAGES_FIX = 'remove it: write "Picture 1: " into the messages if they need numbers'
UNVERIFIED_FIX = "remove it: every engine reports the digests of its pixels"
NO_SPANS = "remove it: OpenTelemetry spans are no longer exported"
REMOVED = {
    "inference.inline_images": INLINE_IMAGES_FIX,
    "inference.sends_images": INLINE_IMAGES_FIX,
    "launch.skypilot": "remove it: SkyPilot is no longer supported",
    "media.allow_unproven": UNVERIFIED_FIX,
    "media.allow_unverified_pixels": UNVERIFIED_FIX,
    "trainer.compress_weights": "remove it: the store no longer holds deltas of weights",
    "model.number_images": NUMBER_IMAGES_FIX,
    "model.number_pictures": NUMBER_IMAGES_FIX,
    "rollout.max_in_flight_mb": "limit the number of rollouts instead: [rollout] max_in_flight",
    "logging.otel": NO_SPANS,
    "monitor.otel": NO_SPANS,
    "trainer.micro_batch_cost_model": COST_MODEL_FIX,
    "trainer.micro_batch_price": COST_MODEL_FIX,
    "trainer.secret": "remove it: a run creates its own secret. If ranks on other machines cannot "
    "read the run directory, set SIGHTLINE_SECRET in the environment of all ranks",
}
"""Removed settings with their fixes."""


def find_new_name(names: list[str]) -> str | None:
    """Return the new name of a renamed setting, or None."""
    key = ".".join(names)
    if key in RENAMED:
        return spell_setting(RENAMED[key].split("."))
    sections = {new.split(".")[0] for old, new in RENAMED.items() if old.startswith(f"{key}.")}
    if len(names) == 1 and len(sections) == 1 and key not in sections:
        return f"[{sections.pop()}]"
    return None


def translate_old_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a stored `config.toml` under the current names."""
    values = copy.deepcopy(values)
    for old, new in RENAMED.items():
        section, key = old.split(".")
        table = values.get(section)
        if not isinstance(table, dict) or key not in table:
            continue
        *path, last = new.split(".")
        value, target = table.pop(key), values
        for name in path:
            target = target.setdefault(name, {}) if isinstance(target, dict) else target
        if isinstance(target, dict):  # validation refuses a plain value here
            target.setdefault(last, value)
    for old in REMOVED:
        section, key = old.split(".")
        if isinstance(table := values.get(section), dict):
            table.pop(key, None)
    if values.get("monitor") == {}:
        del values["monitor"]
    return values


def spell_setting(names: list[str]) -> str:
    """Format a setting as `[section] key`."""
    return f"[{names[0]}]" if len(names) == 1 else f"[{'.'.join(names[:-1])}] {names[-1]}"
