"""The run file: refusals with their messages, and round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sightline.config import (
    RunFile,
    SftFile,
    check_resume,
    dump_toml,
    load_config,
    validate_config,
)
from sightline.config.load import expand_overrides
from sightline.config.renamed import OF_OTHER_FRAMEWORKS, RENAMED
from sightline.errors import ConfigError, ResumeRefused

SMALL = """
[model]
path = "models/tiny"

[env]
name = "color_codeword"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return path


def values(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"path": "m"}, "env": {"name": "e"}, **sections}


def test_override_takes_precedence_over_the_file(run_file: Path) -> None:
    overrides = ["run.seed=3", "trainer.lr=2e-3", "model.path=models/other", "env.args.turns=2"]
    config = load_config(RunFile, run_file, overrides)
    assert (config.run.seed, config.trainer.lr) == (3, 2e-3)
    assert config.model.path == "models/other"
    assert config.env.args == {"turns": 2}


@pytest.mark.parametrize(
    ("override", "problem", "fix"),
    [
        ("seed=3", "seed=3", "section.key=value"),
        ("run.seed", "run.seed", "section.key=value"),
        ("model.path.deep.er=1", "path is not a section", "section"),
        ("run.sed=3", "[run] sed", "'seed'"),
        ("run.seed=many", "[run] seed = 'many'", "value"),
        ("orchestrator.group_size=0", "[orchestrator] group_size = 0", "value"),
        ("trainer.lr=inf", "[trainer] lr = inf", "value"),
        ("run.stop_at=nan", "[run] stop_at = nan", "value"),
        ("filters.min_logprob=nan", "[filters] min_logprob = nan", "value"),
        ("trainer.lr_schedule=square", "[trainer] lr_schedule = 'square'", "value"),
    ],
)
def test_a_bad_override_is_refused_by_name(
    run_file: Path, override: str, problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RunFile, run_file, [override])
    assert problem in refused.value.problem
    assert fix in refused.value.fix


@pytest.mark.parametrize(
    "name", ["", "a b", "../../up", "a/b", "a\nrm -rf x", "$(x)", "-a", ".a", "a'b", "ä", "a" * 101]
)
def test_a_run_name_that_is_no_file_name_is_refused(name: str) -> None:
    base = {"model": {"path": "m"}, "env": {"name": "e"}}
    for valid_name in ("run", "lr-1e-5+b_2.0", "7"):
        RunFile.model_validate({**base, "run": {"name": valid_name}})
    with pytest.raises(ValueError, match="is not a name for a run directory"):
        RunFile.model_validate({**base, "run": {"name": name}})
    with pytest.raises(ValueError, match="cannot be printed"):
        RunFile.model_validate({**base, "run": {"dir": "runs\nrm"}})


def test_unknown_key_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(ConfigError) as refused:
        validate_config(
            RunFile, values(trainer={"learning_rate": 1.0, "weight_deca": 0.1}), "run.toml"
        )
    assert refused.value.problem.startswith("run.toml: unknown key [trainer] ")
    with pytest.raises(ConfigError, match="did you mean 'weight_decay'"):
        validate_config(RunFile, values(trainer={"weight_deca": 0.1}), "run.toml")


@pytest.mark.parametrize(("name", "here"), OF_OTHER_FRAMEWORKS.items())
def test_setting_name_of_another_framework_is_refused_with_ours(name: str, here: str) -> None:
    *sections, key = here.split(".")
    for section in ("trainer", "rollout"):
        with pytest.raises(ConfigError, match=rf"unknown key \[{section}\] {name}") as refused:
            validate_config(RunFile, values(**{section: {name: 1}}), "run.toml")
        assert refused.value.fix == f"use [{'.'.join(sections)}] {key}"
    settings: Any = RunFile.model_validate(values())
    for section in sections:
        settings = getattr(settings, section)
    assert isinstance(settings, dict) or hasattr(settings, key)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run file at .*nothing\.toml"):
        load_config(RunFile, tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a folder, not a run file") as raised:
        load_config(RunFile, tmp_path)
    assert f"model.path={tmp_path}" in raised.value.fix


def test_a_warm_up_file_needs_its_own_section(run_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[sft\] is missing"):
        load_config(SftFile, run_file)
    assert (
        load_config(SftFile, run_file, ["sft.output_dir=models/warm"]).sft.output_dir
        == "models/warm"
    )


def test_dumped_config_loads_unchanged(tmp_path: Path, run_file: Path) -> None:
    overrides = ['media.file_roots=["/a b", "/c\\"d"]', "model.min_pixels=1024", "env.args.k=[1,2]"]
    first = load_config(RunFile, run_file, overrides)
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(first))
    assert load_config(RunFile, again) == first


@pytest.mark.parametrize(
    ("given", "server", "trainer"),
    [
        ({}, 0.3, [0.67, 0.0]),
        ({"launch": {"num_servers": 2}}, 0.15, [0.67, 0.0]),
        ({"eval": {"every": 5}}, 0.15, [0.67, 0.0]),
        ({"inference": {"gpu_memory_utilization": 0.6}}, 0.6, [0.37, 0.0]),
        ({"inference": {"gpu_memory_utilization": 0.95}}, 0.95, [0.1, 0.0]),
        ({"inference": {"device": "cuda:1"}}, 0.3, [0.0, 0.67]),
        ({"inference": {"device": "cuda:2"}}, 0.0, [0.0, 0.0]),
        ({"trainer": {"device": "cuda:3", "ranks": 2}}, 0.0, [0.0, 0.0]),
        ({"trainer": {"device": "cpu", "ranks": 2}}, 0.0, [0.0, 0.0]),
        ({"inference": {"servers": ["http://a:1"]}}, 0.0, [0.0, 0.0]),
        ({"launch": {"on": "ray"}}, 0.0, [0.0, 0.0]),
    ],
)
def test_servers_and_trainer_share_one_gpus_memory(
    given: dict[str, Any], server: float, trainer: list[float]
) -> None:
    file = validate_config(RunFile, values(**{"trainer": {"ranks": 2}, **given}), "shares")
    assert file.server_memory_share == pytest.approx(server)
    trainer_memory_shares = [file.get_trainer_memory_share(rank) for rank in range(2)]
    assert trainer_memory_shares == pytest.approx(trainer)


def test_a_mutable_setting_may_change_when_a_run_is_resumed() -> None:
    old = validate_config(RunFile, values(run={"steps": 10}), "old")
    new = validate_config(RunFile, values(run={"steps": 20}, media={"max_gb": 1.0}), "new")
    check_resume(old, new)


def test_immutable_setting_is_refused_by_name_when_a_run_is_resumed() -> None:
    old = validate_config(RunFile, values(), "old")
    new = validate_config(RunFile, values(trainer={"lr": 0.5}), "new")
    with pytest.raises(ResumeRefused, match=r"\[trainer\] lr was 1e-05 and is now 0\.5"):
        check_resume(old, new)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_of_a_setting_is_refused_with_the_new_one(old: str, new: str) -> None:
    section, key = old.split(".")
    *table, name = new.split(".")
    with pytest.raises(ConfigError) as refused:
        validate_config(RunFile, values(**{section: {key: 1}}), "run.toml")
    assert f"[{section}]" in refused.value.problem
    assert refused.value.fix == f"write [{'.'.join(table)}] {name}"


def test_unknown_key_in_a_mix_is_refused_with_the_closest_known_one() -> None:
    mix = {"mix": [{"name": "e", "wight": 2.0}]}
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        validate_config(RunFile, {"model": {"path": "m"}, "env": mix}, "run.toml")


def test_comma_separated_values_are_separate_runs() -> None:
    overrides = expand_overrides(["run.seed=0,1", "run.steps=3", "trainer.lr=1e-3,2e-3"])
    assert overrides == [
        ["run.seed=0", "run.steps=3", "trainer.lr=1e-3"],
        ["run.seed=0", "run.steps=3", "trainer.lr=2e-3"],
        ["run.seed=1", "run.steps=3", "trainer.lr=1e-3"],
        ["run.seed=1", "run.steps=3", "trainer.lr=2e-3"],
    ]
    for single in ("media.file_roots=[1,2]", "env.args.hint=Hello, you", 'a.b="x,y"', "a.b=x,"):
        assert expand_overrides([single]) == [[single]]


@pytest.mark.parametrize("content", [b"[run\n", b"\xff\xfe"])
def test_invalid_toml_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(RunFile, path)
