"""Model loading: a checkpoint with its family's forward pass and our attention."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from sightline.compute import attention
from sightline.compute.exact import embed_patches, is_patch_embedding, make_exact
from sightline.errors import ConfigError
from sightline.families import Family, Forward, load_forward
from sightline.families.protocol import EngineTrial

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(
    path: str | Path,
    family: Family,
    device: str,
    dtype: str,
    exact: tuple[str, str] | None = None,
    engine: EngineTrial | None = None,
) -> Forward:
    """Load a checkpoint. `exact` is the device and dtype of exact arithmetic (`[model] exact`).

    A family that checks the loaded model also tests the KV cache of `engine`.
    """
    transformers_logging.disable_progress_bar()
    # By default cuDNN rounds float32 convolutions to TF32, which changes logprobs by 1e-4.
    torch.backends.cudnn.allow_tf32 = False
    # torch warns with a C++ stack trace if the CPU cannot multiply in bfloat16.
    warnings.filterwarnings("ignore", "mkldnn_matmul failed, switching to BLAS gemm")
    on, kind = torch.device(device), MODEL_DTYPES[dtype]
    is_exact_gpu = exact is not None and exact[0].startswith("cuda")
    attention_name = attention.register_attention(exact=is_exact_gpu)
    forward = load_forward(path, family, on, kind, attention_name)
    if device != "meta" and (check := getattr(forward, "check_model", None)):
        check(lambda ends: attention.build_attention_pattern(ends, on, kind), engine)
    linearize_patch_embeddings(forward.model)
    if exact is not None:
        make_exact(forward, family, torch.device(exact[0]), MODEL_DTYPES[exact[1]])
    return forward


def check_weights(path: str | Path, family: Family, device: str, dtype: str) -> None:
    """Load a whole model and free it, for a family that checks the loaded model. Ranks, which load
    only their shards, cannot. If the device is too small, the CPU computes the check."""
    if not family.model_class:
        return
    try:
        load_model(path, family, device, dtype)
    except torch.OutOfMemoryError:
        load_model(path, family, "cpu", dtype)
    gc.collect()  # a model refers to itself
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def linearize_patch_embeddings(model: nn.Module) -> None:
    """Replace patch embeddings by matrix products, in place. Parameters keep their names.

    A patch embedding is a convolution whose kernel covers the whole patch, so it equals a matrix
    product. GPU kernels are faster for matrix products than for convolutions.
    """
    for module in model.modules():
        if is_patch_embedding(module):
            module.forward = partial(embed_patches, module, module.forward, F.linear)


def pick_device(name: str) -> str:
    """Return the device `name`; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"torch sees no GPU for device {name!r}", 'set device = "cpu" or "auto"')
    return name


def limit_gpu_memory(device: str, share: float) -> int:
    """Limit this process to a share of the GPU's memory, and return the limit in bytes, or 0 if
    `device` is not a GPU. Processes that share a GPU thus keep to their own shares."""
    if not device.startswith("cuda"):
        return 0
    device_index = torch.device(device).index
    index = torch.cuda.current_device() if device_index is None else device_index
    torch.cuda.set_per_process_memory_fraction(share, index)
    return int(share * torch.cuda.get_device_properties(index).total_memory)


def read_gpu_memory(device: str) -> int:
    """Return the total memory of a GPU in bytes."""
    index = torch.device(pick_device(device)).index or 0
    return int(torch.cuda.get_device_properties(index).total_memory)


def describe_gpus() -> str:
    """Describe the GPUs that torch sees and their memory. Empty for none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ((torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)) for i in range(count))
    texts = (f"{n} ({free / 1e9:.0f} of {size / 1e9:.0f} GB free)" for n, free, size in gpus)
    return ", ".join(texts)


def empty_parameters(path: str | Path, family: Family) -> dict[str, Tensor]:
    """Return the parameters that a trainer of this checkpoint publishes, on the meta device."""
    auto = AutoModelForImageTextToText if family.shows_media else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    return dict(model.named_parameters())
