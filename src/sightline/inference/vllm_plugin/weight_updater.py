"""Weight updates of a vLLM server: checked in the server, then applied between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sightline.compute.checkpoint_files import (
    CheckpointParameters,
    find_transposed,
    open_checkpoint,
)
from sightline.compute.lora_weights import AdapterBase, digest_tensors, resolve_parameter
from sightline.compute.weights import check_parameters, read_tensors
from sightline.errors import EngineError, WeightsError
from sightline.inference.vllm_plugin.symbols import WeightTransferUpdateRequest
from sightline.inference.vllm_plugin.weight_transfer import WEIGHTS_UNCHANGED
from sightline.wire.weights import Manifest


class PartialUpdateError(EngineError):
    """vLLM holds a mix of old and new weights, and must restart."""


@dataclass(frozen=True)
class CheckedWeights:
    """Weights that are complete and fit the model."""

    manifest: Manifest
    info: dict[str, Any]
    """The fields of the worker's `FileUpdateInfo`."""
    vision_digest: str


@dataclass
class WeightUpdater:
    client: Any
    model: Path
    """The checkpoint that vLLM loaded first. Adapters are merged into it."""
    parameters: Mapping[str, torch.Tensor]
    """Names and shapes of the model's parameters, on the meta device."""
    vision: tuple[str, ...]
    """Name prefixes of the vision tower's parameters."""
    manifest: Manifest
    vision_digest: str
    count: int = 0
    vision_count: int = 0

    def __post_init__(self) -> None:
        self._first_vision = self.vision_digest
        self._base = AdapterBase(lambda: CheckpointParameters(self.model, self.parameters))
        self._transposed = find_transposed(open_checkpoint(self.model), self.parameters)

    @property
    def vision_label(self) -> str:
        """Label of the vision weights: their version and the number of changes on this server."""
        return f"{self.manifest.vision_version}.{self.vision_count}"

    @property
    def salt(self) -> str:
        """Salt that separates weight versions in vLLM's prefix cache."""
        return f"{self.manifest.label}.{self.count}"

    def read(self, folder: Path, manifest: Manifest) -> CheckedWeights:
        """Read and check the weights of a manifest. Raise if they are incomplete or do not fit."""
        if not manifest.files:
            problem = f"{folder} has weights without files, but vLLM's worker reads files"
            raise WeightsError(problem, 'set [trainer] publish = "files"')
        tensors = read_tensors(folder, manifest)
        paths = [str(folder / file.name) for file in manifest.files]
        info: dict[str, Any] = {"paths": paths, "transposed": self._transposed}
        if (adapter := manifest.adapter) is None:
            check_parameters(self.parameters, tensors)
            return CheckedWeights(manifest, info, vision_digest(tensors, self.vision))
        base, scales = self._base.check(adapter, tensors), adapter.scales
        info |= {"base": [str(p) for p in sorted(self.model.glob("*.safetensors"))]}
        seeing = [name for name in self.parameters if name.startswith(self.vision)]
        if scales.keys().isdisjoint(seeing) and tensors.keys().isdisjoint(seeing):
            return CheckedWeights(manifest, info | {"scales": scales}, self._first_vision)
        seen = {name: resolve_parameter(name, base, scales, tensors) for name in seeing}
        return CheckedWeights(manifest, info | {"scales": scales}, vision_digest(seen, self.vision))

    async def apply(self, wanted: CheckedWeights, keep_kv: bool) -> None:
        """Apply checked weights. Requests in flight pause, and continue with the new weights.

        Unless `keep_kv` is set, their KV cache is recomputed. So are their image features if the
        vision tower changed, because these requests keep their old engine keys.
        """
        is_vision_new = wanted.vision_digest != self.vision_digest
        await self.client.pause_generation(mode="keep", clear_cache=False)
        try:
            await self.client.start_weight_update()
            request = WeightTransferUpdateRequest(update_info=wanted.info)
            try:
                await self.client.update_weights(request)
            except Exception as error:  # vLLM's exception class, with our worker's message
                if WEIGHTS_UNCHANGED in str(error):
                    raise WeightsError(str(error), "publish the version again") from error
                raise PartialUpdateError(str(error), "start the server again") from error
            await self.client.finish_weight_update(wanted.manifest.label)
            if not keep_kv:
                await self.client.reset_prefix_cache(reset_running_requests=True)
                if is_vision_new:
                    await self.client.reset_encoder_cache()
            self.manifest = wanted.manifest
            self.vision_digest = wanted.vision_digest
            self.count += 1
            self.vision_count += is_vision_new
        finally:
            await self.client.resume_generation()


def vision_digest(tensors: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]) -> str:
    """Return the vision tower's digest. Its version number may repeat after a resume."""
    names = (name for name in tensors if name.startswith(prefixes))
    return digest_tensors((name, tensors[name]) for name in names)
