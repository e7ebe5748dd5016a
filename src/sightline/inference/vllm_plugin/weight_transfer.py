"""Weight loading inside vLLM's worker: published weights, through vLLM's weight transfer, and
checkpoints in a layout that vLLM's model cannot read."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sightline.compute.checkpoint_files import TensorFiles
from sightline.compute.lora_weights import resolve_parameter
from sightline.inference.vllm_plugin import layout, symbols

WEIGHTS_UNCHANGED = "the weights stay"
"""Prefix of errors that leave the weights unchanged. vLLM forwards only an error's text."""


@dataclass
class EmptyInitInfo(symbols.WeightTransferInitInfo):
    """Empty setup information, because files need no setup."""


@dataclass
class FileUpdateInfo(symbols.WeightTransferUpdateInfo):
    paths: list[str]
    """safetensors files that the server has checked."""
    transposed: list[str] = field(default_factory=list)
    """Parameters that the checkpoint stores transposed."""
    base: list[str] = field(default_factory=list)
    """Checkpoint files that adapters are merged into. Empty without adapters."""
    scales: dict[str, float] = field(default_factory=dict)
    """The scale of each adapter, by parameter name."""


class FileWeightTransfer(symbols.WeightTransferEngine):
    init_info_cls = EmptyInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: the weights change only after all files are open."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        try:
            # Open all files first, so that a missing or truncated one changes nothing.
            files, base = TensorFiles(update_info.paths), TensorFiles(update_info.base)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{WEIGHTS_UNCHANGED}: {error}") from error
        symbols.forget_expert_kernels(self.model)
        # Restore the checkpoint's layout in layers that repacked their weights.
        symbols.initialize_layerwise_reload(self.model)
        path = Path(self.model_config.model)
        self.model.load_weights(_read_tensors(files, base, update_info, path))

    def finish_weight_update(self) -> None:
        symbols.finalize_layerwise_reload(self.model, self.model_config)
        symbols.repack_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: there are no resources."""


def _read_tensors(
    given: TensorFiles, base: TensorFiles, update_info: FileUpdateInfo, model: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter as the checkpoint stores it. vLLM fuses and splits them."""

    def read(name: str) -> torch.Tensor:
        tensor = resolve_parameter(name, base, update_info.scales, given)
        is_transposed = name in update_info.transposed and name in given
        return tensor.transpose(-1, -2) if is_transposed else tensor

    parameters = layout.vllm_layout(model, base or given)
    yield from layout.apply_layout(parameters, read)
    yield from layout.read_unpublished(model, parameters)


class LayoutLoader(symbols.DefaultModelLoader):
    """A vLLM model loader that converts our parameter layout to vLLM's."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: Any, model: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from layout.read_checkpoint(Path(model_config.model))
