"""Every name of vLLM that the plugin uses, and how it expects it to look.

`check` compares them with the vLLM that is installed: it runs before a server starts, and a test
runs it for each supported version, so that a name that moved is an error that names it.
`check_app` does the same for what only a vLLM that has loaded can show.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.weight_transfer import (
    WeightTransferEngine,
    WeightTransferEngineFactory,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import mm_input, tokens_input
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import _MAX_TEMP as MIN_TEMPERATURE
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from sightline.errors import ConfigError
from sightline.inference.vllm_plugin import SUPPORTED, check_version

# Documented for people who extend or embed vLLM.
PUBLIC: dict[Any, tuple[str, ...]] = {
    WeightTransferEngineFactory.register_engine: ("name", "module_path_or_cls", "class_name"),
    WeightTransferEngine.__init__: ("config", "vllm_config", "device", "model"),
    WeightTransferEngine.start_weight_update: (),
    WeightTransferEngine.receive_weights: ("update_info",),
    WeightTransferEngine.finish_weight_update: (),
    register_model_loader: ("load_format",),
    LogitsProcessor.__init__: ("vllm_config", "device", "is_pin_memory"),
    LogitsProcessor.apply: ("logits",),
    LogitsProcessor.update_state: ("batch_update",),
    LogitsProcessor.is_argmax_invariant: (),
    EngineClient.generate: ("prompt", "sampling_params", "request_id", "data_parallel_rank"),
    EngineClient.pause_generation: ("mode", "clear_cache"),
    EngineClient.resume_generation: (),
    EngineClient.start_weight_update: (),
    EngineClient.update_weights: ("request",),
    EngineClient.finish_weight_update: ("weight_version",),
    EngineClient.update_weight_version: ("new_version",),
    EngineClient.reset_prefix_cache: ("reset_running_requests",),
    EngineClient.reset_encoder_cache: (),
    SamplingParams: (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos",
        "max_tokens", "logprobs", "prompt_logprobs", "detokenize", "output_kind",
        "skip_reading_prefix_cache", "extra_args",
    ),
}  # fmt: skip

# Reached because no documented way leads there.
PRIVATE: dict[Any, tuple[str, ...]] = {
    mm_input: ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders", "cache_salt"),
    tokens_input: ("prompt_token_ids", "cache_salt"),
    MultiModalFieldConfig.batched: ("modality", "keep_on_cpu"),
    MultiModalFieldConfig.flat: ("modality", "slices", "dim", "keep_on_cpu"),
    MultiModalKwargsItems.from_hf_inputs: ("hf_inputs", "config_by_key"),
    PlaceholderRange: ("offset", "length", "is_embed"),
    DefaultModelLoader.__init__: ("load_config",),
    DefaultModelLoader.get_all_weights: ("model_config", "model"),
    BaseMultiModalProcessorCache.is_cached_item: ("mm_hash",),
    BaseMultiModalProcessorCache.get_and_update_item: ("mm_item", "mm_hash"),
    BaseMultiModalProcessorCache.touch_sender_cache_item: ("mm_hash",),
    BaseMultiModalProcessorCache.invalidate: ("mm_hash",),
    InputProcessor.process_inputs: ("request_id", "prompt", "params"),
    WeightTransferInitInfo: (),
    WeightTransferUpdateInfo: (),
    WeightTransferUpdateRequest: ("update_info",),
    WeightVersionSpan: ("version", "start", "end"),
    CompletionOutput: ("index", "token_ids", "logprobs", "finish_reason", "weight_versions"),
    RequestOutput: ("outputs", "num_cached_tokens", "prompt_logprobs", "metrics"),
    RequestStateStats: ("scheduled_ts", "first_token_ts"),
    process_dict_updates: ("req_entries", "batch_update", "new_state"),
    initialize_layerwise_reload: ("model",),
    finalize_layerwise_reload: (),
    UnquantizedEmbeddingMethod.process_weights_after_loading: ("layer",),
    VLLMValidationError: ("message", "parameter"),
    scheduler_output.strip_covered_mm_data: ("mm_features", "num_computed_tokens", "uses_mrope"),
}

APP_ATTRIBUTES = (
    "state.server.should_exit",
    "state.engine_client.vllm_config.additional_config",
    "state.engine_client.vllm_config.cache_config.enable_prefix_caching",
    "state.engine_client.vllm_config.parallel_config.data_parallel_size",
    "state.engine_client.model_config.multimodal_config.mm_device_do_normalize",
    "state.engine_client.renderer.mm_processor_cache",
    "state.engine_client.input_processor.mm_encoder_cache_size",
    "state.engine_client.errored",
)
"""Attributes of vLLM's application, which has them once its engine is loaded."""

SAMPLED_TOKENS_METRIC = "vllm:generation_tokens_total"
"""vLLM's own count of what its engine has sampled, requests in flight included."""

INSTANCE_ATTRIBUTES = {FusedMoEMethodBase: ("moe_kernel",)}
"""Attributes that a class gives its objects."""

ERRORS = (EngineDeadError, VLLMClientError)
DATA = (MultiModalKwargsItem, RequestOutputKind, MIN_TEMPERATURE)


def keep_images_with_requests() -> None:
    """vLLM sends its worker no pixels of an image that its prefix cache covers. A request that must
    be computed again after a weight update needs them, and without them the worker dies."""
    if scheduler_output.strip_covered_mm_data is not _keep_all:
        scheduler_output.strip_covered_mm_data = _keep_all


def _keep_all(mm_features: Any, num_computed_tokens: int, uses_mrope: bool = False) -> Any:
    return mm_features


def forget_expert_kernels(model: Any) -> None:
    """On a CPU vLLM packs the weights of experts when it makes their kernel, and after an update
    only where there is no kernel yet; the one that there was would read them as if packed."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        if isinstance(method, FusedMoEMethodBase) and is_on_cpu:
            method.moe_kernel = None


def repack_heads(model: Any) -> None:
    """On a CPU vLLM computes logits with a packed copy of the head, which it makes when the head is
    given weights; one that is tied to the embedding is given none by an update."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
            module.quant_method.process_weights_after_loading(module)


def check() -> str:
    """The version that is installed; raises ConfigError unless it looks as the plugin expects."""
    found = check_version()
    moved = [
        f"{_name(thing)} takes {list(parameters(thing))}, not {missing}"
        for table in (PUBLIC, PRIVATE)
        for thing, wanted in table.items()
        if (missing := [name for name in wanted if name not in parameters(thing)])
    ]
    moved += [
        f"{_name(thing)} has no {name}"
        for thing, names in INSTANCE_ATTRIBUTES.items()
        for name in names
        if name not in thing.__init__.__code__.co_names
    ]
    _raise_if_moved(moved)
    return found


def check_app(app: Any) -> None:
    """Raises ConfigError unless vLLM's application has what the plugin reads of it at run time."""
    moved = [f"app.{path} is not there" for path in APP_ATTRIBUTES if not _has_path(app, path)]
    if not list(read_sampled_tokens()):
        moved.append(f"there is no metric {SAMPLED_TOKENS_METRIC}")
    _raise_if_moved(moved)


def read_sampled_tokens() -> Iterator[float]:
    """What the metric `SAMPLED_TOKENS_METRIC` says, of each engine."""
    for metric in REGISTRY.collect():
        yield from (
            sample.value for sample in metric.samples if sample.name == SAMPLED_TOKENS_METRIC
        )


def find_refused_parameter(error: Exception) -> str:
    """The sampling parameter that vLLM refuses, where it says which."""
    return (isinstance(error, VLLMValidationError) and error.parameter) or ""


def _raise_if_moved(moved: list[str]) -> None:
    if moved:
        raise ConfigError(
            f"vLLM {check_version()} is not what the plugin was made for: {'; '.join(moved)}",
            f"install vLLM {' or '.join(SUPPORTED)}",
        )


def _has_path(thing: Any, path: str) -> bool:
    for name in path.split("."):
        if thing is None:
            return True  # a text-only model has no `multimodal_config`
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def parameters(thing: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(thing).parameters if name != "self")


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
