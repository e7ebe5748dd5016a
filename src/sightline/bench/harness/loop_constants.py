"""The constants of a simulation, from what `sightline bench loop -o FILE` has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sightline.bench.harness.simulation import Speeds, Workload
from sightline.errors import ConfigError

_WORKER_PARTS = ("environment", "rendering, requests, images to the store")


def read_loops(paths: Sequence[Path]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        try:
            loop = json.loads(path.read_bytes())
            num_decoded = loop["engine"]["decode_steps"]
            loop["model_bytes"], loop["seconds"]["trainer"]
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}", "name what `sightline bench loop -o FILE` wrote"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not what `sightline bench loop -o` writes: {error!r}", "measure again"
            ) from error
        if not num_decoded:
            raise _build_idle_error(str(path))
        found.append(loop)
    return found


def _build_idle_error(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: nothing was decoded behind the warm-up, so that no speed is known",
        "measure again, with more --steps",
    )


def build_constants(loops: Sequence[dict[str, Any]]) -> tuple[Workload, Speeds]:
    """What the first loop played, and how fast all of them were."""
    first, shape = loops[0], loops[0]["shape"]
    for loop in loops:
        if not loop["engine"]["decode_steps"]:
            raise _build_idle_error(f"a loop of {loop['shape']['rollouts']} rollouts")
    num_turns = _count_steps(first) * shape["rollouts"] * shape["turns"]
    answers = first["tokens_sampled"] / num_turns
    workers = [parts for name, parts in first["seconds"].items() if name.startswith("worker")]
    work = Workload(
        groups_per_step=shape["rollouts"] // shape["group_size"],
        group_size=shape["group_size"],
        max_lag=first["max_lag"],
        turns=shape["turns"],
        prompt_tokens=round(first["tokens_computed"] / num_turns - answers),
        answer_tokens=round(answers),
        image_bytes=first["image_bytes"],
        environment_s=sum(parts[name] for parts in workers for name in _WORKER_PARTS) / num_turns,
    )
    base, per_row = _fit_decode(loops)
    training = [loop["seconds"]["trainer"] for loop in loops]
    parts = ("training: forward", "training: backward")
    seconds = sum(one[name] for one in training for name in parts)
    steps = sum(map(_count_steps, loops))
    once = sum(one["training: optimizer"] + one["publishing"] for one in training)
    in_use, adopt = first["in_use_s"] or 0.0, first["adopt_s"] or 0.0
    engines = [loop["engine"] for loop in loops]
    prefill_s = sum(e["busy_prefill_seconds"] + e["busy_vision_seconds"] for e in engines)
    return work, Speeds(
        decode_step_s=base,
        decode_row_s=per_row,
        prefill_tokens_per_s=sum(e["computed_tokens"] for e in engines) / prefill_s,
        train_tokens_per_s=sum(loop["tokens_computed"] for loop in loops) / seconds,
        step_s=once / steps,
        publish_s=max(in_use - adopt, 0.0),
        adopt_s=adopt,
        model_bytes=first["model_bytes"],
        start_s=first["start_s"],
    )


def _count_steps(loop: dict[str, Any]) -> int:
    return len(loop["step_s"]) - int(loop["warmup"])


def _fit_decode(loops: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of a decoding step, and those that a row adds: a line through what was measured at
    several numbers of rows; with one, the weights are read once at the bandwidth of a copy."""
    engines = [loop["engine"] for loop in loops]
    rows = [e["decode_tokens"] / e["decode_steps"] for e in engines]
    seconds = [e["decode_seconds"] / e["decode_steps"] for e in engines]
    if max(rows) < 1.5 * min(rows):
        base = min(loops[0]["model_bytes"] / loops[0]["copy_bytes_per_s"] * 2, seconds[0])
        return base, (seconds[0] - base) / rows[0]
    slope, base = np.polyfit(rows, seconds, 1)
    return max(float(base), 0.0), max(float(slope), 0.0)
