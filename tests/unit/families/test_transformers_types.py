"""Every image-and-text type of transformers trains and equals transformers, or is refused with a
reason. `make types` tries all of them. These are the ones whose reason or result needed code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from transformers import Glm5NextImageProcessorPil

from sightline import FamilyError
from sightline.families import load_family
from sightline.families.anyvlm.findings import UNSUPPORTED
from sightline.families.anyvlm.forward import refuse_errors
from sightline.families.anyvlm.image_tokens import find_candidates
from sightline.families.anyvlm.processor import find_image_text, load_processor, process
from sightline.families.registry import write_tiny
from tests.transformers_types.__main__ import MARKS, PAGE, list_types
from tests.transformers_types.build import build
from tests.transformers_types.trial import NATIVE, REFUSED, TRAINS, try_type


def test_every_type_is_native_trains_or_is_refused() -> None:
    table = PAGE.read_text().split(MARKS[0])[1]
    results = dict(re.findall(r"^\| `(.*?)` \| ([^|]+) \|", table, re.M))
    assert sorted(results) == list_types()
    assert set(results.values()) == {NATIVE, REFUSED, TRAINS}


@pytest.mark.thorough
def test_model_whose_body_computes_the_features_trains_as_in_transformers(tmp_path: Path) -> None:
    """Only the body of Janus and DeepSeek-VL has `get_image_features`."""
    answer = try_type("janus", tmp_path)
    assert answer.result == TRAINS, answer.reason
    assert answer.difference is not None and answer.difference < 1e-5


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("idefics2", "Idefics2Processor does not tell which tokens belong to an image"),
        ("paligemma", "attends over the whole prompt in both directions"),
        ("ovis2", "replaces the embeddings of the marks around an image"),
    ],
)
def test_reason_says_what_the_model_does(kind: str, reason: str, tmp_path: Path) -> None:
    answer = try_type(kind, tmp_path)
    assert answer.result == REFUSED and reason in answer.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpt_oss", "cannot compute the attention of GptOssModel"),
        ("gpt_neox", "has no text model with `layers` and `embed_tokens`"),
    ],
)
def test_text_model_of_another_form_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    build("llava", tmp_path / "model", text)
    with pytest.raises(FamilyError, match=f"model class trial failed: .*{reason}") as caught:
        load_family(tmp_path / "model")
    assert caught.value.fix == UNSUPPORTED


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vision-encoder-decoder", "its config.json has no vision_config"),
        ("pix2struct", "Pix2StructForConditionalGeneration has no get_image_features"),
    ],
)
def test_type_without_a_tiny_checkpoint_is_refused_for_its_class(
    kind: str, reason: str, tmp_path: Path
) -> None:
    answer = try_type(kind, tmp_path)
    assert answer.result == REFUSED and reason in answer.reason


def test_folder_without_processor_files_names_them(tmp_path: Path) -> None:
    write_tiny("anyvlm", tmp_path, type="llava")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(FamilyError, match="neither preprocessor_config.json nor processor_config"):
        load_family(tmp_path)


def test_text_of_an_image_in_a_prompt_may_differ_from_its_tokens(tmp_path: Path) -> None:
    """Qianfan-OCR's chat template writes `<image>`, which its processor replaces."""
    build("qianfan_ocr", tmp_path)
    processor = load_processor(tmp_path)
    assert find_image_text(processor) == "<image>" != processor.image_token
    _, text = process(processor, Image.new("RGB", (64, 64)))
    assert text.count(processor.image_token) == 256


def test_image_processor_without_pixel_limits_follows_no_rule_with_limits() -> None:
    processor = SimpleNamespace(image_processor=Glm5NextImageProcessorPil())
    assert [rule for rule, _ in find_candidates(processor)] == ["fixed"]


def test_text_only_checkpoints_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="'gpt_oss' checkpoint.* names no causal language model"):
        load_family(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["GptOssForCausalLM"]})
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FamilyError, match="cannot compute the attention of GptOssModel"):
        load_family(tmp_path)


def test_folder_saved_with_a_video_processor_loads(tmp_path: Path) -> None:
    """`save_pretrained` writes the settings of all parts into processor_config.json."""
    write_tiny("anyvlm", tmp_path, type="qwen2_vl")
    images = json.loads((tmp_path / "preprocessor_config.json").read_text())
    saved = {
        "image_processor": images,
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14},
        "processor_class": "Qwen2VLProcessor",
    }
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    assert load_family(tmp_path).model_class.startswith("Qwen2VLForConditionalGeneration")


def test_error_of_the_models_code_names_the_type_and_the_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "stone"}')
    cause: Exception = StopIteration("no more tiles")
    problem = "'stone' stopped with StopIteration: no more tiles"
    with pytest.raises(FamilyError, match=problem), refuse_errors(tmp_path):
        raise cause
    cause = ImportError("Tower requires the timm library. You can install it with pip:")
    problem = "needs a package that is not installed: Tower requires the timm library$"
    with pytest.raises(FamilyError) as caught, refuse_errors(tmp_path):
        raise cause
    assert re.search(problem, caught.value.problem) and "install the package" in caught.value.fix
    with pytest.raises(MemoryError), refuse_errors(tmp_path):  # says nothing about the type
        raise MemoryError
