"""Convert a GGUF file, the format of llama.cpp, to a checkpoint folder.

transformers reads the file: it dequantizes the weights, undoes llama.cpp's permutation of the
attention's rows, and builds the tokenizer and the chat template from the file's metadata.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sightline.errors import FamilyError
from sightline.families.checkpoint_files import first_line
from sightline.regular_file import check_file


def import_gguf(file: Path, folder: Path, dtype: str) -> list[str]:
    """Write the model of a GGUF file into `folder`. Return the file's types of weights."""
    from gguf import GGUFReader  # an extra

    try:
        kinds = sorted({tensor.tensor_type.name for tensor in GGUFReader(check_file(file)).tensors})
        options = {"gguf_file": file.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=getattr(torch, dtype), **options
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise FamilyError(
            f"transformers cannot read {file}: {first_line(error)}",
            "copy the file again, or choose a model type that transformers reads from GGUF",
        ) from error
    # The weights are no longer quantized, and transformers does not save a quantized model.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # only its owner could read it
    tokenizer.save_pretrained(folder)
    return kinds
