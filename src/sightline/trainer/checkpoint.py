"""Checkpoints of the trainer: everything that makes the next step bit-equal.

A checkpoint is a folder that appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from sightline.compute.weights import check_names
from sightline.errors import ResumeRefused
from sightline.trainer.shard import like, whole_tensor
from sightline.wire.file import append_line, read_lines, write_atomic

_NAME = re.compile(r"step_(\d{6})")


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    vision_version: int
    schema: int = 1


class LedgerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step in the history of the weights, and the batch that it trained on."""

    step: int
    batch: str


@dataclass(frozen=True)
class Tensors:
    """What a checkpoint holds, gathered from all ranks."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def gather(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Every rank calls it."""
    return Tensors(parameters_of(model), _optimizer_tensors(optimizer))


@dataclass
class Checkpoints:
    root: Path
    keep: int

    def save(self, tensors: Tensors, state: State) -> None:
        target = self.root / f"step_{state.step:06d}"
        if target.is_dir():
            return
        part = self.root / f".{target.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(tensors.model, part / "model.safetensors")
        save_file(tensors.optimizer, part / "optimizer.safetensors")
        write_atomic(part / "state.json", msgspec.json.encode(state))
        for file in part.iterdir():
            _sync(file)
        os.rename(part, target)
        _sync(self.root)
        self._prune()

    def newest(self) -> Path | None:
        found = self._all()
        return found[-1] if found else None

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
        """Restores the newest checkpoint; step 0 when there is none."""
        path = self.newest()
        if path is None:
            return State(step=0, vision_version=0)
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
        _restore_model(model, load_file(path / "model.safetensors"))
        _restore_optimizer(optimizer, load_file(path / "optimizer.safetensors"), path)
        return state

    def _all(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return sorted(p for p in self.root.iterdir() if _NAME.fullmatch(p.name))

    def _prune(self) -> None:
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old)


class Ledger:
    """Every step in the history of the surviving weights, once."""

    def __init__(self, path: Path, step: int) -> None:
        # Steps after the checkpoint are about to be played again: they leave the ledger first.
        self._path = path
        lines = [msgspec.json.decode(line, type=LedgerLine) for line in read_lines(path)]
        self._before = {line.step: line.batch for line in lines}
        kept = [line for line in lines if line.step <= step]
        if [line.step for line in kept] != list(range(1, step + 1)):
            raise ResumeRefused(
                f"{path} does not hold every step up to the checkpoint's {step}",
                "start a new run from the checkpoint",
            )
        write_atomic(path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    def add(self, step: int, batch: str) -> None:
        known = self._before.get(step)
        if known is not None and known != batch:
            raise ResumeRefused(
                f"step {step} was trained on batch {known[:12]} and is to be replayed on "
                f"{batch[:12]}",
                "restore batches/ of the run, or start a new run",
            )
        append_line(self._path, msgspec.json.encode(LedgerLine(step, batch)), sync=True)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, on the CPU; every rank calls it. One at a time leaves the device again."""
    return {name: _on_cpu(p) for name, p in model.named_parameters()}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return whole_tensor(tensor.detach()).cpu().contiguous()


def _restore_model(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    own = dict(model.named_parameters())
    check_names(own, tensors)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(like(tensors[name], parameter))


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside parameters: the bias of a router, say. It does not train."""
    kept = model.state_dict().keys()
    buffers = model.named_buffers()
    return {name: b.detach().cpu().contiguous() for name, b in buffers if name in kept}


def export_checkpoint(source: Path, target: Path, model: torch.nn.Module) -> None:
    """A plain transformers checkpoint: the source's files with the model's weights."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index.json" not in file.name:
            shutil.copy2(file, part / file.name)
    weights = parameters_of(model) | _buffers_of(model)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    os.rename(part, target)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"{index}.{name}"] = _on_cpu(value)
    return tensors


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], path: Path
) -> None:
    torch.set_rng_state(tensors.pop("rng"))
    description = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        own = parameters[int(index)] if int(index) < len(parameters) else None
        if own is not None and value.shape == own.shape:
            value = like(value, own.detach())
        state.setdefault(int(index), {})[name] = value
    known = {i for group in description["param_groups"] for i in group["params"]}
    if not set(state) <= known:
        raise ResumeRefused(
            f"{path} holds optimizer state of other parameters than the model trains",
            "resume with the [model] settings that the run began with",
        )
    description["state"] = state
    optimizer.load_state_dict(description)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
