"""Reads published weights inside vLLM's worker: our back end of its weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from sightline.compute.adapters import parameter
from sightline.compute.stored import Opened
from sightline.inference.vllm_plugin.layout import laid_out, left_out, vllm_layout
from sightline.inference.vllm_plugin.symbols import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    forget_expert_kernels,
    initialize_layerwise_reload,
)

WEIGHTS_STAY = "the weights stay"
"""Begins the words of a failure that has changed nothing; they are all that vLLM passes on."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be arranged: files are there or they are not."""


@dataclass
class Files(WeightTransferUpdateInfo):
    paths: list[str]
    """safetensors files whose checksums, names and shapes the server has checked."""
    turned: list[str] = field(default_factory=list)
    """Parameters that vLLM reads the other way round than the trainer writes them."""
    base: list[str] = field(default_factory=list)
    """Of adapters: the files of the checkpoint that they are added to."""
    scales: dict[str, float] = field(default_factory=dict)
    """Of adapters: how much each counts."""


class FileTransfer(WeightTransferEngine):
    init_info_cls = NoInit
    update_info_cls = Files

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """There is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Nothing yet: until the files are open, the weights stay as they are."""

    def receive_weights(self, update_info: Files) -> None:
        try:
            # All before the first is read: a file that is gone or cut off is found here.
            given, base = Opened(update_info.paths), Opened(update_info.base)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{WEIGHTS_STAY}: {error}") from error
        forget_expert_kernels(self.model)
        # Layers that hold their weights in another form than the checkpoint's get them back.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(given, base, update_info, Path(self.model_config.model)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No resource outlives an update."""


def _tensors(
    given: Opened, base: Opened, update_info: Files, model: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, as a checkpoint stores it: vLLM joins and cuts them itself."""

    def read(name: str) -> torch.Tensor:
        tensor = parameter(name, base, update_info.scales, given)
        is_turned = name in update_info.turned and name in given
        return tensor.transpose(-1, -2) if is_turned else tensor

    layout = vllm_layout(model, base or given)
    yield from laid_out(layout, read)
    yield from left_out(model, layout)
