"""`sightline check`: a line for each check, and the first failure with its fix."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import embedded

from sightline.cli.main import main
from sightline.config import RunFile, SftFile, load_config
from sightline.errors import ConfigError
from sightline.inference.server_spec import ServerSpec
from sightline.launch.checks.model import check_memory
from sightline.launch.jobs import SftJob
from sightline.media import MediaStore
from sightline.run import RunDir


@pytest.fixture
def file(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tiny_model}"\n[env]\nname = "color_codeword"\n')
    return path


def test_valid_run_reports_a_value_for_every_check(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(file), "inference.engine=torch"]) == 0
    output = capsys.readouterr().out
    names = ("model", "settings", "engine", "ports", "memory", "disk", "prompts", "store")
    assert [line.split()[0] for line in output.splitlines() if line.split()[0] in names] == [*names]
    assert "the longest of 3 first prompts has" in output and "this run can start" in output
    assert not (file.parent / "runs").exists()


def test_missing_chat_template_is_reported(
    file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_model, file.parent / "copy"))
    (copy / "chat_template.jinja").unlink()
    file.write_text(file.read_text() + '[sft]\noutput_dir = "out"\n')
    assert main(["check", str(file), f"model.path={copy}"]) == 0
    output = capsys.readouterr().out
    assert "chat format: Qwen3-VL, because the folder has no chat template" in output
    assert "copy its chat_template.jinja into the folder" in output


def test_sft_run_is_also_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text() + '[sft]\noutput_dir = "out"\n')
    assert main(["check", str(file)]) == 0
    assert "memory" in capsys.readouterr().out


def test_runs_of_a_sweep_print_the_model_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(file.read_text() + '[sft]\noutput_dir = "out"\n')
    config, job = load_config(SftFile, file), SftJob()
    for _ in range(2):
        job.check(config, RunDir(file.parent / "runs"))
    assert capsys.readouterr().out.count("chat format: ") == 1


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("inference.max_model_len=12", "max_tokens = 4 needs 15; [inference] max_model_len = 12"),
        ("media.root=run.toml", "run.toml"),
        ("env.name=colour", "is not a built-in environment"),
        ("env.name=os:path", "it cannot be called"),
        ("env.name=os:getcwd", "is not an environment"),
        ("env.name=:Env", "does not name a module"),
        ("run.dir=run.toml", "cannot create a run directory in"),
        ("run.dir=/sys/runs", "cannot create a run directory in /sys/runs"),
    ],
)
def test_invalid_override_is_refused_with_its_fix(
    file: Path, capsys: pytest.CaptureFixture[str], override: str, problem: str
) -> None:
    assert main(["check", str(file), override, "rollout.max_tokens=4"]) == 2
    errors = capsys.readouterr().err
    assert problem in errors and "fix: " in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model.safetensors", "model.safetensors is not a complete safetensors file"),
        ("tokenizer.json", "tokenizer.json is broken"),
        ("config.json", "config.json is broken"),
        ("preprocessor_config.json", "preprocessor_config.json is broken"),
    ],
)
@pytest.mark.parametrize("share", [0, 0.5, "[]"])
def test_truncated_checkpoint_file_is_named(
    file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str, share
) -> None:
    copy = Path(shutil.copytree(tiny_model, file.parent / "copy"))
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(b"[]" if share == "[]" else data[: int(len(data) * share)])
    assert main(["check", str(file), f"model.path={copy}"]) == 2
    errors = capsys.readouterr().err
    assert problem in errors and "fix: copy it again" in errors and "Traceback" not in errors


def set_image_token(config: dict[str, Any]) -> None:
    config["image_token_id"] += 1


def swap_ends(tokenizer: dict[str, Any]) -> None:
    ends = [t for t in tokenizer["added_tokens"] if t["content"] in ("<|im_end|>", "<|endoftext|>")]
    ends[0]["content"], ends[1]["content"] = ends[1]["content"], ends[0]["content"]


@pytest.mark.parametrize(
    ("name", "edit", "problem"),
    [
        ("config.json", set_image_token, "the chat format writes an image as the tokens"),
        ("tokenizer.json", swap_ends, "tokenizer_config.json says that '<|endoftext|>' is token"),
        ("generation_config.json", lambda config: config.update(eos_token_id=[3]), "ends a turn"),
        ("config.json", lambda config: config.update(eos_token_id=3), "eos_token_id = 3, but"),
    ],
)
def test_files_with_different_token_ids_are_refused(
    file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], name: str, edit, problem: str
) -> None:
    copy = Path(shutil.copytree(tiny_model, file.parent / "copy"))
    values = json.loads((copy / name).read_text())
    edit(values)
    (copy / name).write_text(json.dumps(values))
    assert main(["check", str(file), f"model.path={copy}"]) == 2
    errors = capsys.readouterr().err
    assert problem in errors and "from the same checkpoint" in errors


def test_incompatible_server_is_refused(
    file: Path, settings: ServerSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that another run leases, that read other weights, or that have other images."""
    here = file.parent
    spec = settings.replace(media_roots=[here / "media"], weights_root=here / "runs")
    with embedded(spec) as client:
        address = f"http://{client.host}:{client.port}"
        words = ["check", str(file), f'inference.servers=["{address}"]', "media.root=media"]
        assert main(words) == 0, capsys.readouterr().err
        assert not list(MediaStore(here / "media").digests()), "the image that was tried is gone"
        for override, problem in (
            ("media.root=other", f"cannot read an image that is in [media] root = {here}/other"),
            ("run.dir=other", f"takes no weights from {here}/other"),
        ):
            assert main([*words, override]) == 2
            assert problem in capsys.readouterr().err
        lease = b'{"run": "beef", "seconds": 600}'
        assert client.call("POST", "/sightline/v1/lease", lease)[0] == 200
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert "is leased to run beef" in errors and "fix: end that run" in errors
    assert not (here / "runs").exists()


def test_environment_that_fails_to_build_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unbuilt_env.py").write_text(
        "from sightline import Environment\n"
        "class Unbuilt(Environment):\n"
        "    def __init__(self):\n"
        "        raise OSError('no data here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", str(file), "env.name=unbuilt_env:Unbuilt"]) == 2
    assert "cannot be built: OSError: no data here" in capsys.readouterr().err


def test_tokenizer_from_another_model_is_refused(
    file: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    config = json.loads((copy / "config.json").read_text())
    (config.get("text_config") or config)["vocab_size"] = 20
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["check", str(file), f"model.path={copy}"]) == 2
    assert "the tokenizer has" in capsys.readouterr().err


def test_environment_failing_before_its_first_turn_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_env.py").write_text(
        "from sightline import Environment, Task\n"
        "class Broken(Environment):\n"
        "    def task(self, index, split):\n"
        "        return Task(index, split, None)\n"
        "    async def rollout(self, task, chat):\n"
        "        raise KeyError('colour')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        assert main(["check", str(file), "env.name=broken_env:Broken"]) == 2
    finally:
        sys.path.remove(str(tmp_path))
    assert "failed before its first answer: KeyError: 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        ("await chat.send([user('word ' * 1000)])", "cannot fit into max_model_len = 64 tokens"),
        ("pass", "ended without a model call"),
    ],
    ids=["too_long", "no_call"],
)
def test_environment_without_a_first_prompt_that_fits_is_refused(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rollout: str,
    problem: str,
) -> None:
    """The renderer refuses a text that is much too long, so it never becomes a request."""
    (file.parent / "unfit_env.py").write_text(
        "from sightline import Environment, Task, user\n"
        "class Unfit(Environment):\n"
        "    name = 'unfit'\n"
        "    def task(self, index, split):\n"
        "        return Task(index, split, None)\n"
        "    async def rollout(self, task, chat):\n"
        f"        {rollout}\n"
        "        return 1.0\n"
    )
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "unfit_env", raising=False)
    words = ["env.name=unfit_env:Unfit", "inference.max_model_len=64", "rollout.max_tokens=4"]
    assert main(["check", str(file), *words]) == 2
    said = capsys.readouterr().err
    assert problem in said and "fix: " in said


def test_model_larger_than_memory_is_refused(file: Path) -> None:
    config = load_config(RunFile, file, ["trainer.device=cpu"])
    with pytest.raises(ConfigError, match="without activations"):
        check_memory(config, available=1000)


def test_missing_shard_is_named(
    file: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_model, file.parent / "copy"))
    weights = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert main(["check", str(file), f"model.path={copy}"]) == 2
    assert "model-00002-of-00002.safetensors is missing" in capsys.readouterr().err
