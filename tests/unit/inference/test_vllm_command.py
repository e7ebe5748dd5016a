"""The command that starts vLLM contains the server's settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sightline.errors import ConfigError, FamilyError
from sightline.families import load_renderer
from sightline.families.registry import write_tiny
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin import CONFIG_KEY, LOAD_FORMAT, LOGITS_PROCESSOR, MIDDLEWARE
from sightline.inference.vllm_plugin.command import build_vllm_command
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
def test_one_setting_sizes_both_engines_caches(
    settings: ServerSpec, mebibytes: int, gibibytes: float
) -> None:
    sized = settings.replace(pixel_cache_mb=mebibytes)
    words = build_vllm_command(sized, "python")
    gigabytes = float(value(words, "--mm-processor-cache-gb"))
    assert gigabytes == pytest.approx(gibibytes, abs=1e-6)
    assert (gigabytes == 0) == (mebibytes == 0), "0 is off"
    ours = json.loads(value(words, "--additional-config"))[CONFIG_KEY]
    assert ServerSpec.model_validate(ours["spec"]) == sized


def test_vllm_command_contains_plugin_sizes_and_pads(
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


def test_recurrent_layers_are_refused_in_float32_on_a_cpu(
    settings: ServerSpec, tmp_path: Path
) -> None:
    write_tiny("qwen_vl", tmp_path / "model", seed=0, type="qwen3_5")
    recurrent = settings.replace(path=str(tmp_path / "model"))
    with pytest.raises(FamilyError, match="recurrent layers"):
        build_vllm_command(recurrent, "python")
    assert "bfloat16" in build_vllm_command(recurrent.replace(dtype="bfloat16"), "python")


def test_the_generic_family_is_served_by_transformers_class(
    settings: ServerSpec, tmp_path: Path
) -> None:
    write_tiny("anyvlm", tmp_path / "model", seed=0)
    words = build_vllm_command(settings.replace(path=str(tmp_path / "model")), "python")
    assert value(words, "--model-impl") == "transformers"
    assert value(words, "--load-format") == LOAD_FORMAT
    crop = json.loads(value(words, "--mm-processor-kwargs"))
    assert crop == {"crop_size": {"height": 16, "width": 16}}


def test_several_devices_and_extra_options_reach_the_command(settings: ServerSpec) -> None:
    spec = settings.replace(
        engine="vllm",
        tensor_parallel_size=2,
        data_parallel_size=3,
        gpu_memory_utilization=0.5,
        engine_args={
            "enable_expert_parallel": True,
            "kv_cache_dtype": "auto",
            "async-scheduling": False,
        },
    )
    words = build_vllm_command(spec, "python")
    for option, value in (
        ("--tensor-parallel-size", "2"),
        ("--data-parallel-size", "3"),
        ("--gpu-memory-utilization", "0.5"),
        ("--kv-cache-dtype", "auto"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--enable-expert-parallel" in words and "--no-async-scheduling" in words


@pytest.mark.parametrize("name", ["port", "max_model_len", "logits-processors"])
def test_option_set_by_sightline_is_refused(settings: ServerSpec, name: str) -> None:
    spec = settings.replace(engine="vllm", engine_args={name: 1})
    with pytest.raises(ConfigError, match=f"engine_args has {name}"):
        build_vllm_command(spec, "python")
