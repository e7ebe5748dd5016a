"""The tiny checkpoint: whole, small, the same from the same seed, and read by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sightline import FamilyError, MediaStore, load_renderer
from sightline.families.registry import write_tiny
from sightline.message import user


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_model, local_files_only=True)


def test_transformers_auto_classes_load_it(tiny_model: Path, model: Any) -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_model, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(tiny_model, backend="pil", local_files_only=True)
    assert config.model_type == "qwen3_vl"
    assert len(tokenizer) == config.text_config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert images.size["shortest_edge"] == 1024
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"


def test_the_files_of_the_processor_agree(tiny_model: Path) -> None:
    images = json.loads((tiny_model / "preprocessor_config.json").read_text())
    videos = json.loads((tiny_model / "video_preprocessor_config.json").read_text())
    for file in (images, videos):
        assert file["processor_class"] == "Qwen3VLProcessor"
    for key in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std"):
        assert images[key] == videos[key]
    assert (tiny_model / "chat_template.jinja").is_file()


def test_it_is_small_and_vllm_can_serve_it(model: Any) -> None:
    total = sum(p.numel() for p in model.parameters())
    assert 400_000 < total < 500_000
    assert model.config.text_config.head_dim >= 32
    vision = model.config.vision_config
    assert vision.hidden_size // vision.num_heads >= 32
    rope = model.config.text_config.rope_parameters
    assert sum(rope["mrope_section"]) == model.config.text_config.head_dim // 2
    assert not model.config.tie_word_embeddings
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    assert head.data_ptr() != embedding.data_ptr()


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="depth"):
        write_tiny("qwen_vl", tmp_path, seed=0, depth=3)
    with pytest.raises(FamilyError, match="deepstack"):
        write_tiny("qwen_vl", tmp_path, seed=0, deepstack=(2,))
    with pytest.raises(FamilyError, match="qwen_vl"):
        write_tiny("no_such_family", tmp_path, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_a_role_is_one_token_and_every_byte_has_one(tiny_model: Path, tmp_path: Path) -> None:
    renderer = load_renderer(tiny_model, MediaStore(tmp_path))
    ids = renderer.render([user("A")]).token_ids
    assert [renderer.decode([token]) for token in ids] == [
        "<|im_start|>", "user", "\n", "A", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n",
    ]  # fmt: skip
    text = "".join(map(chr, range(1, 0x250))) + "漢🙂"
    rendered = renderer.render([user(text)]).token_ids
    assert text in renderer.decode(rendered)
