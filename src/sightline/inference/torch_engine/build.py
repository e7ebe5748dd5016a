"""Construction of the embedded engine: its device, model, memory and first weights."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sightline.compute.model import MODEL_DTYPES, limit_gpu_memory, load_model, pick_device
from sightline.compute.weight_transport import WeightReceiver
from sightline.config import InferenceConfig
from sightline.errors import ConfigError
from sightline.families import Family
from sightline.families.protocol import EngineTrial
from sightline.inference.serve import ServerComponents
from sightline.inference.server_spec import ServerSpec
from sightline.inference.torch_engine.engine import TorchEngine
from sightline.inference.torch_engine.kv_cache import ExactPagedPattern, KVCache, PagedPattern
from sightline.inference.torch_engine.policy_weights import PolicyWeights
from sightline.inference.torch_engine.row_table import StepPlan
from sightline.pixels import Materializer
from sightline.wire.weights import Manifest, read_manifest

DEFAULT_MEMORY_SHARE = 0.9
"""Default share of GPU memory, for a GPU without a trainer."""
SPARE_BYTES = 3 << 30
"""Workspace of a step, including CUDA graphs."""


def build_engine(
    spec: ServerSpec, family: Family, materializer: Materializer, banned: tuple[int, ...]
) -> TorchEngine:
    """Load the model of a server's spec and return its engine."""
    torch.set_num_threads(spec.num_threads)
    device, dtype = pick_device(spec.inference.device), spec.model.dtype
    share = spec.inference.gpu_memory_utilization or DEFAULT_MEMORY_SHARE
    limit = limit_gpu_memory(device, share)
    exact = (device, dtype) if spec.model.exact else None
    trial = build_trial(spec.inference.max_model_len, device, dtype)
    forward = load_model(spec.model.path, family, device, dtype, exact, trial)

    def read_base() -> dict[str, Tensor]:
        loaded = load_model(spec.model.path, family, "cpu", dtype)
        return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}

    weights = PolicyWeights(forward.model, read_base)
    manifest = Manifest(version=0, vision_version=0, files=[], run=spec.run_id)
    if spec.weights is not None:
        manifest = read_manifest(spec.weights)
        with WeightReceiver().open_tensors(spec.weights.parent, manifest) as tensors:
            weights.adopt(manifest.adapter, weights.check(manifest.adapter, tensors))
    max_kv_bytes = plan_memory(device, limit, spec.inference) if limit else 0
    return TorchEngine(forward, family, materializer, banned, spec, manifest, weights, max_kv_bytes)


def build_trial(max_model_len: int, device: str, dtype: str) -> EngineTrial:
    """Return the engine's parts that a family may try before it takes an unknown model."""

    def build_cache(num_rows: int, length: int) -> Callable[..., PagedPattern | ExactPagedPattern]:
        kv = KVCache(num_rows, length, torch.device(device), MODEL_DTYPES[dtype])
        return lambda rows, starts, counts: kv.build_pattern(
            StepPlan(rows, starts, counts, np.ones(len(rows), dtype=bool))
        )

    return EngineTrial(max_model_len, build_cache)


def build_from_components(components: ServerComponents) -> TorchEngine:
    banned = components.renderer.pad_token_ids
    materializer = components.build_materializer()
    return build_engine(components.spec, components.family, materializer, banned)


def plan_memory(device: str, limit: int, inference: InferenceConfig) -> int:
    """Return the bytes of `limit` left for the KV cache once the model is loaded."""
    spare = SPARE_BYTES + inference.feature_cache_mb * 2**20
    weight_bytes = torch.cuda.memory_allocated(device)
    left = limit - weight_bytes - spare
    parts = f"{weight_bytes / 1e9:.1f} GB of weights, {spare / 1e9:.1f} GB of work space"
    if left <= 0:
        held = f"the server's {limit / 1e9:.1f} GB of {device} hold {parts}"
        problem = f"{held}, and no room is left for the KV cache"
        raise ConfigError(problem, "raise [inference] gpu_memory_utilization")
    plan = f"{limit / 1e9:.1f} GB for this server; {parts}, up to {left / 1e9:.1f} GB of KV cache"
    print(f"memory of {device}: {plan}", file=sys.stderr, flush=True)
    return left
