"""The registry of inference engines, and an engine from outside the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sightline.config import InferenceConfig
from sightline.envs import load_environment
from sightline.errors import ConfigError
from sightline.launch.evaluate import build_eval_config, play_evaluation
from sightline.rollout.engines import ENGINE_SETTINGS, list_engines, load_engine

SOURCE = """
from pathlib import Path
from sightline.inference.serve import serve
from sightline.rollout.engines import InferenceEngine

class OutsideEngine(InferenceEngine):
    settings = frozenset({"engine_args"})

    def serve(self, spec):
        from sightline.inference.torch_engine.build import build_from_components

        Path(__file__).with_name("served").write_text(spec.inference.engine)
        serve(spec, build_from_components)
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the Python path whose distribution provides the engine "outside"."""
    (tmp_path / "outside_engine.py").write_text(SOURCE)
    info = tmp_path / "outside_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-engine\nVersion: 1.0\n")
    entry_point = "[sightline.engines]\noutside = outside_engine:OutsideEngine\n"
    (info / "entry_points.txt").write_text(entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    load_engine.cache_clear()
    yield tmp_path
    load_engine.cache_clear()
    sys.modules.pop("outside_engine", None)


def test_external_engine_serves_by_its_entry_point(outside: Path, tiny_model: Path) -> None:
    values = {"env": {"name": "color_codeword"}, "inference": {"engine": "outside"}}
    settings = {"tasks": 2, "max_tokens": 4, "device": "cpu"}
    config = build_eval_config(values, str(tiny_model), settings)
    played = play_evaluation(load_environment("color_codeword", {}), config)
    assert (outside / "served").read_text() == "outside"
    assert [len(p.trace.turns) > 0 for p in played] == [True, True]


def test_the_registry_lists_every_engine(outside: Path) -> None:
    assert list_engines() == ["outside", "torch", "vllm"]
    assert load_engine("outside").name == "outside"


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'sglang' is not an engine") as refused:
        load_engine("sglang")
    assert "vllm" in refused.value.fix


def test_setting_unused_by_the_engine_is_refused() -> None:
    values = {
        "python": "python3",
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "engine_args": {"a": 1},
    }
    assert set(values) == set(ENGINE_SETTINGS)
    for name, value in values.items():
        with pytest.raises(ConfigError, match=rf"\[inference\] {name} requires engine = "):
            load_engine("torch").check_settings(InferenceConfig(**{name: value}))
    load_engine("vllm").check_settings(InferenceConfig(tensor_parallel_size=2))
