"""Every image-and-text type of transformers trains and equals transformers, or is refused with a
reason. `make types` tries all of them. These are the ones whose reason or result needed code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Glm5NextImageProcessorPil

from sightline import FamilyError
from sightline.families import load_family
from sightline.families.anyvlm.admission import try_arrays
from sightline.families.anyvlm.findings import UNSUPPORTED, Findings
from sightline.families.anyvlm.image_tokens import ImageTokens, find_candidates
from sightline.families.anyvlm.layout import RULES
from sightline.families.anyvlm.processor import find_image_text, load_processor, process
from sightline.families.registry import write_tiny
from sightline.families.transformers_forward import refuse_errors
from tests.transformers_types.__main__ import MARKS, PAGE, ROOT, list_tried_files, list_types
from tests.transformers_types.build import build
from tests.transformers_types.trial import NATIVE, REFUSED, TRAINS, try_type


def test_every_type_is_native_trains_or_is_refused() -> None:
    table = PAGE.read_text().split(MARKS[0])[1]
    results = dict(re.findall(r"^\| `(.*?)` \| ([^|]+) \|", table, re.M))
    assert sorted(results) == list_types()
    assert set(results.values()) == {NATIVE, REFUSED, TRAINS}


def test_results_are_kept_until_code_that_a_type_uses_changes() -> None:
    code = {str(file.relative_to(ROOT)) for file in list_tried_files()}
    used = ("families/rope.py", "families/transformers_forward.py", "compute/model.py")
    assert {f"src/sightline/{name}" for name in used} < code


def test_native_type_is_compared_with_transformers(tmp_path: Path) -> None:
    answer = try_type("qwen2_5_vl", tmp_path)
    assert answer.result == NATIVE, answer.reason
    assert answer.difference is not None and answer.difference < 1e-5


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
        ("mistral4", "lists 'mistral4' as an image-and-text type"),
        ("pi0", "`architectures` (PI0ForConditionalGeneration) name no text-only model"),
    ],
)
def test_reason_says_what_the_model_does(kind: str, reason: str, tmp_path: Path) -> None:
    answer = try_type(kind, tmp_path)
    assert answer.result == REFUSED and reason in answer.reason


def test_reason_names_every_rule_once_and_both_counts(tmp_path: Path) -> None:
    """Patches are tried with two settings. Neither agrees with a processor that ignores a limit."""
    write_tiny("anyvlm", tmp_path, type="qwen2_vl")

    class Misled:
        image_processor = SimpleNamespace(
            patch_size=14, merge_size=2, min_pixels=1, max_pixels=2 * 28**2
        )

        def __call__(self, **inputs: Any) -> Any:
            return load_processor(tmp_path)(**inputs)

        def __getattr__(self, name: str) -> Any:
            return getattr(load_processor(tmp_path), name)

    processor = Misled()
    with pytest.raises(FamilyError) as caught:
        ImageTokens(tmp_path, processor).find_rule(Findings(pad=processor.image_token))
    rules = caught.value.problem.partition("Tried: ")[2].split("; ")
    assert [rule.partition(" (")[0] for rule in rules] == [RULES["fixed"][1], RULES["patches"][1]]
    assert all(re.search(r"x\d+ becomes \d+ tokens instead of \d+\)$", rule) for rule in rules)


class Tower:
    def get_image_features(self, pixel_values: object, sizes: object) -> None: ...


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([np.ones(1), np.ones(1)], "an array sizes of length 1 for an image of 64x64 pixels"),
        ([np.ones((4, 2)), np.ones((6, 3))], r"an entry of sizes depends .*: \(2,\) and \(3,\)"),
    ],
)
def test_reason_says_which_array_of_the_processor_differs(
    sizes: list[np.ndarray], reason: str
) -> None:
    rows = {(64, 64): 4, (64, 96): 6}
    processed = {
        size: ({"pixel_values": np.ones((num, 8)), "sizes": array}, "")
        for (size, num), array in zip(rows.items(), sizes, strict=True)
    }
    images: Any = SimpleNamespace(processed=processed)
    checkpoint: Any = SimpleNamespace(model=Tower(), base=None, images=images)
    with pytest.raises(FamilyError, match=reason):
        try_arrays(checkpoint, Findings(rule="patches"))


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
    with pytest.raises(FamilyError, match="'gpt_oss' .*none. name no text-only model"):
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
    with pytest.raises(FamilyError, match=problem), refuse_errors(tmp_path, UNSUPPORTED):
        raise cause
    cause = ImportError("Tower requires the timm library. You can install it with pip:")
    problem = "needs a package that is not installed: Tower requires the timm library$"
    with pytest.raises(FamilyError) as caught, refuse_errors(tmp_path, UNSUPPORTED):
        raise cause
    assert re.search(problem, caught.value.problem) and "install the package" in caught.value.fix
    # It says nothing about the type.
    with pytest.raises(MemoryError), refuse_errors(tmp_path, UNSUPPORTED):
        raise MemoryError
