"""The command that starts vLLM says what the server's settings say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.families import load_renderer
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin import CONFIG_KEY, LOGITS_PROCESSOR, MIDDLEWARE
from sightline.launch.vllm_server import build_vllm_command
from sightline.media import MediaStore


@pytest.fixture
def settings(tiny_model: Path, store: MediaStore) -> ServerSpec:
    return ServerSpec.of(
        path=tiny_model,
        media_roots=(store.root,),
        device="cpu",
        port=81,
        max_num_seqs=7,
        max_model_len=99,
    )


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1
    return words[words.index(option) + 1]


@pytest.mark.parametrize(("mebibytes", "gibibytes"), [(256, 0.25), (1, 1 / 1024), (0, 0.0)])
def test_one_setting_sizes_our_cache_and_that_of_vllm(
    settings: ServerSpec, mebibytes: int, gibibytes: float
) -> None:
    sized = settings.replace(pixel_cache_mb=mebibytes)
    words = build_vllm_command(sized, "python")
    told = float(value(words, "--mm-processor-cache-gb"))
    assert told == pytest.approx(gibibytes, abs=1e-6)
    assert (told == 0) == (mebibytes == 0), "0 is off"
    ours = json.loads(value(words, "--additional-config"))[CONFIG_KEY]
    assert ServerSpec.model_validate(ours["spec"]) == sized


def test_the_command_has_the_plugin_the_sizes_and_the_pads(
    settings: ServerSpec, tiny_model: Path, store: MediaStore
) -> None:
    words = build_vllm_command(settings, "python")
    assert words[0] == "python"
    assert value(words, "--middleware") == MIDDLEWARE
    assert value(words, "--logits-processors") == LOGITS_PROCESSOR
    assert (value(words, "--max-model-len"), value(words, "--max-num-seqs")) == ("99", "7")
    assert value(words, "--logprobs-mode") == "processed_logprobs"
    banned = json.loads(value(words, "--additional-config"))[CONFIG_KEY]["banned"]
    assert banned == list(load_renderer(tiny_model, store).pad_token_ids)


def test_without_prefix_caching_vllm_has_no_prefix_cache(settings: ServerSpec) -> None:
    assert "--no-enable-prefix-caching" not in build_vllm_command(settings, "python")
    bare = build_vllm_command(settings.replace(enable_prefix_caching=False), "python")
    assert "--no-enable-prefix-caching" in bare
