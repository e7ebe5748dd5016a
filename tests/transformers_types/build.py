"""Write a tiny random checkpoint of any image-and-text type, from the defaults of its classes.

The widths and depths of the default configuration are made small. Image and patch sizes stay, so
that the processor's defaults fit the model. The tokenizer is a small byte-level BPE with the
special tokens that the processor's code names. The chat template writes the processor's image
token.
"""

from __future__ import annotations

import copy
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

import sightline.families
from sightline.families.registry import write_tiny
from sightline.families.tiny_checkpoint import ROLE_MERGES, _fill_constants, build_bpe_tokenizer
from sightline.render.tokenizer import split_words

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
MARKS = ("<|pad|>", "<|start|>", "<|end|>")
TEMPLATE = """{%- for message in messages -%}<|start|>{{ message.role }}
{% if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}<|end|>
{% endfor -%}{%- if add_generation_prompt -%}<|start|>assistant
{% endif -%}"""
HEADS = 4
CHANGES = tomllib.loads(Path(__file__).with_name("types.toml").read_text())
_SIDES = r"(vision_|text_|out_|vit_|mm_|cross_|encoder_|decoder_|projection_|projector_|output_)*"
_STACKS = r"(num_)?(hidden_|encoder_|decoder_|self_attention_|transformer_|global_)*"
_WIDTHS = (
    r"hidden_size|hidden_dim|embed_dim|dim|embedding_size|width|n_embd|n_embed|d_model|d_kv_model|"
    r"projection_dim|image_hidden_size|mm_hidden_size|q_hidden_size"
)
SMALL: tuple[tuple[str, int], ...] = (
    (r"num_key_value_heads|num_kv_heads|num_attention_groups", 2),
    (r"(num|n)?_?(attention_|encoder_|decoder_|cross_attention_)*(heads|head)|n_heads?", HEADS),
    (rf"{_STACKS}(layers|blocks|depth)|n_layers?|depth", 2),
    (r"(qk_nope_|v_|global_|attention_|swa_)?head_dim", 16),
    (r"qk_rope_head_dim|index_head_dim", 8),
    (r"(q|kv|o|kv_lora|q_lora)_?(lora_)?rank", 16),
    (r"n_routed_experts|num_local_experts|num_experts|moe_num_experts|n_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_experts_per_token", 2),
    (r"n_group|topk_group|n_shared_experts|moe_num_shared_experts|first_k_dense_replace", 1),
    (r".*(intermediate|ffn|mlp)_(size|dim|hidden_size).*|d_ff|ffn_dim|.*_ffn_dim", 64),
    (rf"{_SIDES}({_WIDTHS})", 64),
    (r"hidden_size_per_layer_input", 8),
    (r"vocab_size_per_layer_input", 512),
)
"""Names of settings in configurations, and their largest values in a tiny checkpoint."""


def list_native() -> dict[str, tuple[str, str]]:
    """Return the family and type of the tiny checkpoints that Sightline writes itself."""
    kinds = {}
    for folder in sightline.families.__path__:
        for file in sorted(Path(folder).glob("*/tiny.toml")):
            for kind in tomllib.loads(file.read_text())["types"]:
                kinds[kind] = (file.parent.name, kind)
    return kinds


def build(kind: str, path: Path, text_kind: str = "") -> None:
    """Write a checkpoint of the type into `path`, with another text model if one is named."""
    native = list_native()
    if kind in native and not text_kind:
        family, name = native[kind]
        write_tiny(family, path, type=name)
        return
    torch.manual_seed(0)
    source = _read_processor_source(kind)
    names = sorted(set(re.findall(r"tokenizer\.(\w+_token)\b", source)) | {"image_token"})
    own = ("bos_token", "eos_token", "pad_token", "unk_token")
    names = [name for name in names if name not in own and not name.startswith("add_")]
    literal = re.findall(r"""["'](<[^"'\s<>{}]{1,40}>|\[[A-Z_]{2,20}\]|\|[A-Z]+\|)["']""", source)
    named = {name: f"<{name.removesuffix('_token')}>" for name in names}
    changes = CHANGES.get(kind, {})
    named |= changes.get("named", {})
    special = list(dict.fromkeys([*MARKS, *named.values(), *literal, *changes.get("special", ())]))
    words = build_bpe_tokenizer(ROLE_MERGES, split_words(WORDS), special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=MARKS[0],
        bos_token=MARKS[1],
        eos_token=MARKS[2],
        extra_special_tokens=named,
    )
    config = shrink_config(kind, tokenizer)
    if text_kind:
        config.text_config = shrink_config(text_kind, tokenizer)
    processor = build_processor(kind, tokenizer, config)
    image = getattr(processor, "image_token", None) or named["image_token"]
    text = image if isinstance(image, str) else str(image)
    text = changes.get("image", text)
    processor.chat_template = TEMPLATE.replace("IMAGE", text)
    set_token_ids(config, tokenizer, processor)
    set_pad_id(config, processor, text)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _fill_constants(model, 0.05)
    path.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config)(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(path)


def _read_processor_source(kind: str) -> str:
    processor_class = _find_part(kind, "processor_class", PROCESSOR_MAPPING_NAMES)
    return inspect.getsource(inspect.getmodule(processor_class)) if processor_class else ""


def _find_part(kind: str, part: str, names: Mapping[str, Any]) -> Any:
    """Return the class of a processor's part that types.toml or transformers names, or None."""
    name = CHANGES.get(kind, {}).get(part) or names.get(kind)
    if isinstance(name, dict):
        name = name.get("pil") or name.get("torchvision")
    return getattr(transformers, name) if name else None


def build_processor(kind: str, tokenizer: Any, config: Any) -> Any:
    processor_class = _find_part(kind, "processor_class", PROCESSOR_MAPPING_NAMES)
    if not processor_class:
        raise ValueError("transformers has no processor class for it")
    parameters = inspect.signature(processor_class.__init__).parameters
    images = _find_part(kind, "image_processor", IMAGE_PROCESSOR_MAPPING_NAMES)
    if not images:
        raise ValueError("transformers has no image processor for it")
    parts: dict[str, Any] = {}
    changes = CHANGES.get(kind, {})
    vision = getattr(config, "vision_config", None)
    size, patch = (getattr(vision, name, None) for name in ("image_size", "patch_size"))
    options = {}
    if "image_processor.image_seq_length" in _read_processor_source(kind):
        options["image_seq_length"] = (size // patch) ** 2
    parts["image_processor"] = images(**options, **changes.get("images", {}))
    fit_sizes(config, parts["image_processor"])
    parts |= {name: tokenizer for name in parameters if name.endswith("_tokenizer")}
    for part, names, settings_name in (
        ("video_processor", VIDEO_PROCESSOR_MAPPING_NAMES, "videos"),
        ("feature_extractor", FEATURE_EXTRACTOR_MAPPING_NAMES, "audio"),
    ):
        if part in parameters and (part_class := _find_part(kind, part, names)):
            parts[part] = part_class(**changes.get(settings_name, {}))
    num_tokens = None
    if isinstance(getattr(vision, "image_size", None), int) and isinstance(patch, int):
        num_tokens = (vision.image_size // patch // getattr(vision, "hidden_stride", 1)) ** 2
    wanted = {
        "patch_size": patch and patch * getattr(config, "downsample_factor", 1),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "image_seq_length": getattr(config, "image_seq_length", num_tokens),
        "num_image_tokens": getattr(config, "num_image_tokens", None),
        "num_additional_image_tokens": 1
        if "clip" in str(getattr(vision, "model_type", ""))
        else None,
        "image_seq_len": getattr(config, "image_seq_len", None),
    }
    settings = {n: v for n, v in wanted.items() if v is not None and n in parameters}
    settings |= changes.get("processor", {})
    return processor_class(**parts, tokenizer=tokenizer, **settings)


def shrink_config(kind: str, tokenizer: Any) -> Any:
    config_class = CONFIG_MAPPING[kind]
    values = _shrink(build_config(kind).to_dict(), len(tokenizer))
    _merge(values, CHANGES.get(kind, {}).get("config", {}))
    values.pop("transformers_version", None)
    values.pop("dtype", None)
    return config_class(**values)


def build_config(kind: str) -> Any:
    """Return the type's default configuration, with the changes that types.toml names."""
    return CONFIG_MAPPING[kind](**copy.deepcopy(CHANGES.get(kind, {}).get("config", {})))


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = copy.deepcopy(value)


def _shrink(values: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a configuration with small widths and depths."""
    depth = values.get("num_hidden_layers")
    is_grouped = values.get("num_key_value_heads") != values.get("num_attention_heads")
    small: dict[str, Any] = {}
    for name, value in values.items():
        small[name] = value
        if name == "per_layer_config":
            small[name] = {}
        elif name == "num_key_value_heads" and not is_grouped:
            small[name] = HEADS
        elif name == "head_dim" and value is None:
            small[name] = 16
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            small[name] = _shrink(value, vocab_size)
        elif name == "vocab_size":
            small[name] = vocab_size
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        elif isinstance(value, list | tuple) and value and len(value) == depth:
            kinds = list(dict.fromkeys(map(str, value)))
            second = next((v for v in value if str(v) != kinds[0]), value[0])
            small[name] = [value[0], second]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            numbers = (number for pattern, number in SMALL if re.fullmatch(pattern, name))
            small[name] = min(next(numbers, value), value)
    return small


def fit_sizes(config: Any, images: Any) -> None:
    """Give the vision tower and the image processor the same fixed size, if both have one."""
    vision = getattr(config, "vision_config", None)
    size = getattr(images, "crop_size", None) or getattr(images, "size", None) or {}
    if not isinstance(getattr(vision, "image_size", None), int) or not size.get("height"):
        return
    unit = vision.patch_size * getattr(config, "downsample_factor", 1)
    side = size["height"] // unit * unit
    vision.image_size = side
    for name in ("crop_size", "size"):
        if (getattr(images, name, None) or {}).get("height"):
            setattr(images, name, type(getattr(images, name))(height=side, width=side))


def set_token_ids(config: Any, tokenizer: Any, processor: Any) -> None:
    """Point the configuration's token ids at the tokenizer."""
    known = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    todo = [config]
    while todo:
        part = todo.pop()
        for name, value in list(vars(part).items()):
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                todo.append(value)
            found = re.fullmatch(r"(.*?)_?token_(id|index)", name)
            if not found or not isinstance(value, int):
                continue
            role = found[1] or "image"
            token = getattr(processor, f"{role}_token", None) or getattr(
                tokenizer, f"{role}_token", None
            )
            token_id = known.get(role)
            if token_id is None and isinstance(token, str):
                token_id = tokenizer.convert_tokens_to_ids(token)
            if token_id is None and value >= len(tokenizer):
                token_id = tokenizer.pad_token_id
            if token_id is not None:
                setattr(part, name, token_id)


def set_pad_id(config: Any, processor: Any, image_text: str) -> None:
    """Point the configuration at the token that the processor writes for an image."""
    try:
        image = Image.new("RGB", (300, 200))
        encoded = processor(images=[[image]], text=[image_text], return_tensors="pt")
    except Exception:  # the trial names the cause
        return
    special = set(processor.tokenizer.added_tokens_decoder)
    ids = [i for i in np.asarray(encoded["input_ids"]).reshape(-1).tolist() if i in special]
    for name in ("image_token_id", "image_token_index"):
        if ids and hasattr(config, name):
            setattr(config, name, Counter(ids).most_common(1)[0][0])
