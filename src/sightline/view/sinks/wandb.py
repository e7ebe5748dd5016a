"""Sink for Weights & Biases, online or offline. Requires the `wandb` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sightline.view.sinks import RolloutRow, RunIdentity


class Wandb:
    def __init__(self, folder: Path, run: RunIdentity, offline: bool) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project="sightline",
            name=run.name,
            id=run.unique_name,
            config=run.settings,
            resume="allow",
            dir=str(folder),
            mode="offline" if offline else "online",
        )
        # The step is a metric, because processes' events interleave and steps may be replayed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._run.log({name.replace(".", "/"): v for name, v in values.items()} | {"step": step})

    def samples(self, step: int, samples: list[RolloutRow]) -> None:
        table = self._wandb.Table(columns=["rollout", "verdict", "reward", "text"])
        images = []
        for s in samples:
            table.add_data(s.trace_id, s.verdict, s.reward, s.text)
            for thumb in s.thumbs:
                images.append(self._wandb.Image(thumb, caption=f"{s.trace_id}, {s.reward}"))
        # Not inside the table, where offline runs keep only image names.
        self._run.log({"samples": table, "images": images, "step": step})

    def close(self) -> None:
        self._run.finish()
