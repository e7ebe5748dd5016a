"""Reads published weights inside vLLM's worker: our back end of its weight transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sightline.inference.vllm_plugin.symbols import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    finalize_layerwise_reload,
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


class FileTransfer(WeightTransferEngine):
    init_info_cls = NoInit
    update_info_cls = Files

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """There is nothing to connect to."""

    def start_weight_update(self) -> None:
        """Nothing yet: until the files are open, the weights stay as they are."""

    def receive_weights(self, update_info: Files) -> None:
        with ExitStack() as opened:
            try:
                # All before the first is read: a file that is gone or cut off is found here.
                files = [
                    opened.enter_context(safe_open(path, framework="pt", device="cpu"))
                    for path in update_info.paths
                ]
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{WEIGHTS_STAY}: {error}") from error
            # Layers that hold their weights in another form than the checkpoint's get them back.
            initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(files))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No resource outlives an update."""


def _tensors(files: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.keys():
            yield name, file.get_tensor(name)
