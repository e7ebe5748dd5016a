"""Reads weights inside vLLM's worker: published ones, as our back end of its weight transfer, and
those of a checkpoint whose layout is not the one that vLLM's model reads."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sightline.compute.checkpoint_files import TensorFiles
from sightline.compute.lora_weights import resolve_parameter
from sightline.inference.vllm_plugin.layout import (
    apply_layout,
    read_checkpoint,
    read_unpublished,
    vllm_layout,
)
from sightline.inference.vllm_plugin.symbols import (
    DefaultModelLoader,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
    forget_expert_kernels,
    initialize_layerwise_reload,
    repack_heads,
)

WEIGHTS_UNCHANGED = "the weights stay"
"""Begins the words of a failure that has changed nothing; they are all that vLLM passes on."""


@dataclass
class EmptyInitInfo(WeightTransferInitInfo):
    """Nothing has to be arranged: files are there or they are not."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    paths: list[str]
    """safetensors files whose checksums, names and shapes the server has checked."""
    transposed: list[str] = field(default_factory=list)
    """Parameters that vLLM reads transposed, as its checkpoint stores them."""
    base: list[str] = field(default_factory=list)
    """Files of the checkpoint that adapters are added to; empty where the update has none."""
    scales: dict[str, float] = field(default_factory=dict)
    """The scale of each adapter, by the name of its parameter."""


class FileWeightTransfer(WeightTransferEngine):
    init_info_cls = EmptyInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        """There is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Nothing yet: until the files are open, the weights stay as they are."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        try:
            # All before the first is read: a file that is gone or cut off is found here.
            given, base = TensorFiles(update_info.paths), TensorFiles(update_info.base)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{WEIGHTS_UNCHANGED}: {error}") from error
        forget_expert_kernels(self.model)
        # Layers that hold their weights in another form than the checkpoint's get them back.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(
            _read_tensors(given, base, update_info, Path(self.model_config.model))
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def shutdown(self) -> None:
        """No resource outlives an update."""


def _read_tensors(
    given: TensorFiles, base: TensorFiles, update_info: FileUpdateInfo, model: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, as a checkpoint stores it: vLLM joins and cuts them itself."""

    def read(name: str) -> torch.Tensor:
        tensor = resolve_parameter(name, base, update_info.scales, given)
        is_transposed = name in update_info.transposed and name in given
        return tensor.transpose(-1, -2) if is_transposed else tensor

    layout = vllm_layout(model, base or given)
    yield from apply_layout(layout, read)
    yield from read_unpublished(model, layout)


class LayoutLoader(DefaultModelLoader):
    """vLLM's own loader, but for what it reads."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: Any, model: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from read_checkpoint(Path(model_config.model))
