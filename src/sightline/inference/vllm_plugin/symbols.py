"""All vLLM names that the plugin uses. No other module imports vllm.

The plugin accepts one version of vLLM (`check_version`), because some of these names are private.
To support another version, run `make test-vllm` with it.
"""

# ruff: noqa: F401

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMClientError
from vllm.inputs import mm_input, tokens_input
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import _MAX_TEMP as MIN_TEMPERATURE
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.logits_processor import LogitsProcessor

SAMPLED_TOKENS_METRIC = "vllm:generation_tokens_total"
"""vLLM's count of sampled tokens, including requests in flight."""


def keep_images_with_requests() -> None:
    """Make vLLM send its worker the pixels of images that its prefix cache covers.

    Without them, the worker crashes when a request is recomputed after a weight update.
    """
    scheduler_output.strip_covered_mm_data = _keep_all


def _keep_all(mm_features: Any, num_computed_tokens: int, uses_mrope: bool = False) -> Any:
    return mm_features


def forget_expert_kernels(model: Any) -> None:
    """Make vLLM pack the experts' weights again after an update on a CPU.

    vLLM packs them when it creates their kernel. An existing kernel would misread new weights.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        if isinstance(method, FusedMoEMethodBase) and is_on_cpu:
            method.moe_kernel = None


def repack_heads(model: Any) -> None:
    """Make vLLM pack the head again after an update on a CPU.

    A head that is tied to the embedding gets no weights of its own in an update.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)


def read_sampled_tokens() -> float:
    """Return the number of tokens that all engines have sampled."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == SAMPLED_TOKENS_METRIC)
