"""Trainer steps on several ranks, in real processes, and the comparison of their results."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sightline.launch.processes import reserve_port

TABLE_VARIABLE = "EQUALITY_TABLE"
"""Environment variable with the file that collects the rows of all test processes."""
PROGRAM = Path(__file__).parent / "ranks" / "rank_step.py"


@dataclass
class Found:
    tensors: dict[str, torch.Tensor]
    metrics: dict[str, Any]
    scores: list[Any]
    ranks: list[dict[str, Any]]
    case: str = ""
    """Model and options, for the table of differences."""

    @property
    def nbytes(self) -> list[int]:
        return [rank["bytes"] for rank in self.ranks]

    @property
    def ways(self) -> set[str]:
        """Modes in which blocks computed."""
        return {way for rank in self.ranks for way in rank["ways"]}

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.tensors.items() if not k.startswith("after.")}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.tensors.items() if k.startswith("after.")}


def run_ranks(model: Path, size: int, out: Path, *words: str) -> None:
    here = "127.0.0.1"
    meet = f"{here}:{reserve_port(here, 0, 'test')}"
    channel = f"tcp://{here}:{reserve_port(here, 0, 'test')}"
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), meet, channel, str(model),
             str(out / "media"), str(out), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, "\n".join(outputs)


def take_step(model: Path, size: int, out: Path, *words: str) -> Found:
    run_ranks(model, size, out, *words)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(size)]
    return Found(
        load_file(out / "found.safetensors"),
        json.loads((out / "metrics.json").read_text()),
        json.loads((out / "scores.json").read_text()),
        ranks,
    )


def check_equal(alone: Found, together: Found) -> None:
    check_gradients(alone, together)
    # A rank that computes nothing, or a tower without gradient, would pass the checks above.
    assert sum(float(g.norm()) > 0 for g in alone.gradients.values()) > len(alone.gradients) / 2
    for name, value in alone.metrics.items():
        if name in ("micro_batches", "tokens", "probe"):
            continue  # empty micro-batches count, with a token each
        ours = together.metrics[name]
        assert (ours is None) == (value is None), name
        assert value is None or math.isclose(ours, value, rel_tol=1e-5, abs_tol=1e-7), name
    named = [[(trace, node) for trace, node, _ in found.scores] for found in (alone, together)]
    assert named[0] == named[1]


def check_gradients(alone: Found, together: Found) -> None:
    record_step(alone, together)
    assert together.gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        off = float((together.gradients[name] - gradient).norm())
        assert off <= 1e-5 * float(gradient.norm()) + 1e-9, (name, off, float(gradient.norm()))


def record_step(alone: Found, together: Found) -> None:
    """Add a row for a step, whether or not it is equal."""
    losses = (
        {"loss": torch.tensor(found.metrics["loss"], dtype=torch.float64)}
        for found in (together, alone)
    )
    record(
        together.case,
        len(together.ranks),
        gradients=find_error(together.gradients, alone.gradients),
        loss=find_error(*losses),
        weights=find_error(together.weights, alone.weights),
    )


def record(case: str, ranks: int, **errors: float) -> None:
    """Add a row to the table that tests/ranks prints at its end, with relative errors."""
    if path := os.environ.get(TABLE_VARIABLE):
        with Path(path).open("a") as file:
            file.write(json.dumps([case, ranks, errors]) + "\n")


def find_error(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error of a tensor. Differences of rounding to zero are none."""
    errors = [0.0]
    for name, tensor in theirs.items():
        off = float((ours[name].double() - tensor.double()).norm()) if name in ours else math.inf
        if off > 1e-9:
            errors.append(off / max(float(tensor.double().norm()), 1e-30))
    return max(errors)
