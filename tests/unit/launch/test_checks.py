"""A run that cannot work is refused before anything starts, with a fix."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sightline.cli.main import main
from sightline.config import RunFile, SftFile, resolve_paths
from sightline.errors import ConfigError, DiskFull, MediaError
from sightline.families.registry import write_tiny
from sightline.launch.checks.model import check_disk, check_store, count_disk_bytes
from sightline.launch.processes import split_threads
from sightline.run import RunDir
from sightline.run.machine import has_gpu
from sightline.trainer.export import FileSizes


@pytest.fixture
def refuse(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Run `sightline rl` on a file that must be refused, and return the message."""
    monkeypatch.chdir(tmp_path)

    def run(extra: str = "", *overrides: str, model: Path = tiny_model) -> str:
        file = tmp_path / "run.toml"
        file.write_text(
            f'[model]\npath = "{model}"\n[env]\nname = "color_codeword"\n[run]\nname = "r"\n{extra}'
        )
        assert main(["rl", str(file), *overrides]) == 2
        assert not (tmp_path / "runs" / "r-001" / "logs").exists(), "nothing has started"
        errors = capsys.readouterr().err
        assert "fix: " in errors and "Traceback" not in errors
        return errors

    return run


def test_text_only_model_is_refused_for_an_image_environment(refuse, tmp_path: Path) -> None:
    unknown = tmp_path / "text"
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "parrot"}))
    assert "is a 'parrot' checkpoint, which no family supports" in refuse(model=unknown)
    text_only = tmp_path / "text_only"
    write_tiny("qwen_vl", text_only, seed=0, type="qwen3")
    message = refuse(model=text_only)
    assert "'color_codeword' has images" in message and "has no vision tower" in message
    assert "choose a vision-language checkpoint" in message


def test_a_run_dir_that_is_a_file_is_refused(refuse) -> None:
    assert "cannot create a run directory in" in refuse("", "run.dir=run.toml")


def test_a_folder_without_weights_is_refused(refuse, tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    for file in copy.glob("*.safetensors"):
        file.unlink()
    assert "has no weights" in refuse(model=copy)
    assert "sightline model tiny" in refuse(model=tmp_path / "nowhere")


def test_a_missing_teacher_is_refused(refuse) -> None:
    message = refuse('[algorithm]\nname = "distill"\nteacher = "teacher"\n')
    assert "teacher' is no folder with weights" in message


def test_teacher_with_another_vocabulary_is_refused(refuse, tmp_path: Path) -> None:
    write_tiny("glm_v", tmp_path / "teacher", seed=0)
    settings = '[algorithm]\nname = "distill"\nteacher = "teacher"\n'
    message = refuse(settings)
    assert "has another vocabulary than the policy: token" in message
    assert "has another vocabulary" in refuse(settings + 'teacher_server = "http://127.0.0.1:9"\n')


def test_teachers_server_that_does_not_answer_is_refused(refuse, tmp_path: Path) -> None:
    write_tiny("qwen_vl", tmp_path / "teacher", seed=7)
    message = refuse(
        '[algorithm]\nname = "distill"\nteacher = "teacher"\n'
        'teacher_server = "http://127.0.0.1:9"\n'
    )
    assert "[algorithm] teacher_server: http://127.0.0.1:9 does not answer" in message


def test_unwritable_store_is_refused(refuse, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, no folder")
    assert "occupied" in refuse("", f"media.root={tmp_path / 'occupied'}")


def test_a_port_in_use_is_refused(refuse) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        message = refuse("", f"inference.port={port}")
    assert f"[inference] port = {port}" in message and "set 0" in message


def test_address_of_another_machine_is_refused(refuse) -> None:
    message = refuse("", "inference.host=192.0.2.1")
    assert "[inference] port = 0: cannot listen at 192.0.2.1:0: Cannot assign" in message
    assert "fix: set host to an address of this machine" in message


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize("section", ["trainer", "inference"])
def test_missing_gpu_is_refused(refuse, section: str) -> None:
    began = time.monotonic()
    message = refuse("", f"{section}.device=cuda", "model.path=org/not-yet-downloaded")
    assert f"[{section}] device = 'cuda', but this machine has no GPU" in message
    assert time.monotonic() - began < 2.0
    assert f"[{section}] device = 'gpu'" in refuse("", f"{section}.device=gpu")


def test_missing_environment_is_refused(refuse) -> None:
    assert "is not a built-in environment" in refuse("", "env.name=no_such_game")
    assert "has no 'Nothing'" in refuse("", "env.name=sightline.envs.color_codeword:Nothing")
    assert "[env.args] does not fit" in refuse("", "env.args.colour=3")


def test_insufficient_disk_space_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    supervised = {"model": {"path": str(tiny_model)}, "env": {"name": "color_codeword"}}
    sft_file = SftFile.model_validate(supervised | {"sft": {"output_dir": "out"}})
    for file in (run_file(tiny_model), sft_file):
        check_disk(file, RunDir(tmp_path / "run"), spare_bytes=0)
        with pytest.raises(DiskFull, match="bytes free.* GB stay in reserve") as refused:
            check_disk(file, RunDir(tmp_path / "run"), spare_bytes=1 << 60)
        assert "keep_checkpoints" not in refused.value.fix, "the reserve alone is too much"


def test_only_checkpoints_that_a_run_writes_need_space(tiny_model: Path) -> None:
    """Two are kept, and the third is written before the oldest is deleted."""
    values = run_file(tiny_model).model_dump()
    for every, expected in ((1_000_000, 1), (10, 1), (5, 2), (1, 3)):
        values["run"]["steps"], values["trainer"]["checkpoint_every"] = 10, every
        assert count_disk_bytes(RunFile.model_validate(values), FileSizes(1, 0, 0)) == expected


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("algorithm.loss", "pppo", "is not built in"),
        ("algorithm.loss_args.clip", "0.2", "cannot be called with"),
        ("algorithm.loss", "json:dumps", "cannot be called with|failed on a small batch|returned"),
        ("algorithm.aggregation", "mean", "is not built in"),
        ("algorithm.advantage", "nowhere:advantage", "nowhere"),
        ("algorithm.credit", "tokens", "is not built in"),
        ("filters.custom", '["json:dumps"]', "failed on a small batch"),
        ("algorithm.advantage", ":f", "does not name a module"),
        ("algorithm.loss", ".mine:f", "does not name a module"),
    ],
)
def test_invalid_algorithm_is_refused_by_its_setting(
    refuse, setting: str, value: str, problem: str
) -> None:
    message = refuse("", f"{setting}={value}")
    section, name = setting.split(".")[:2]
    assert f"[{section}] {name.removesuffix('_args')}" in message
    assert re.search(problem, message)


def run_file(model: Path, **sections: dict[str, object]) -> RunFile:
    return RunFile.model_validate(
        {"model": {"path": str(model)}, "env": {"name": "color_codeword"}, **sections}
    )


def test_threads_of_server_and_trainer_share_the_cores(tiny_model: Path) -> None:
    shared = split_threads(run_file(tiny_model), cores=8)
    assert (shared.server, shared.trainer) == (4, 4)
    alone = split_threads(run_file(tiny_model), cores=1)
    assert (alone.server, alone.trainer) == (1, 1)
    threads = split_threads(run_file(tiny_model, inference={"threads": 3}), cores=8)
    assert (threads.server, threads.trainer) == (3, 5)
    with pytest.raises(ConfigError, match="exceed the 4 cores"):
        split_threads(
            run_file(tiny_model, inference={"threads": 3}, trainer={"threads": 2}), cores=4
        )


def test_interpreter_lacking_vllm_is_refused(refuse) -> None:
    message = refuse(f'[inference]\nengine = "vllm"\npython = "{sys.executable}"\n')
    assert "vLLM is not installed" in message and "docs/vllm.md" in message
    message = refuse('[inference]\nengine = "vllm"\npython = "no/such/python"\n')
    assert "is not an interpreter" in message


@pytest.mark.parametrize("way", ["broadcast", "ipc"])
def test_weights_without_files_are_refused_for_file_readers(refuse, way: str) -> None:
    publish = f'[trainer]\npublish = "{way}"\n'
    message = refuse(f'{publish}[inference]\nengine = "vllm"\n')
    assert f'publish = "{way}" does not work with [inference] engine = "vllm"' in message
    assert "set publish to one of: files, store" in message
    assert "[eval] every, which needs files" in refuse(f"{publish}[eval]\nevery = 2\n")


ELSEWHERE = """
[media]
root = "http://10.0.0.1:8100"
[launch]
address = "10.0.0.1"
[launch.hosts]
"""


@pytest.mark.parametrize("publish", ["files", "broadcast"])
def test_weights_reach_other_machines_only_through_the_store(refuse, publish: str) -> None:
    message = refuse(f'[trainer]\npublish = "{publish}"\n{ELSEWHERE}server = "ssh b"\n')
    assert "does not reach other machines" in message and 'publish = "store"' in message


def test_inexact_engine_is_refused_in_exact_mode(refuse) -> None:
    message = refuse("", "model.exact=true", "inference.engine=vllm")
    assert "[model] exact = true does not work" in message and "order of summation" in message


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("lora.rank=4", "[lora] rank"),
        ("model.exact=true", "[model] exact"),
        ("trainer.compile_backend=inductor", "[trainer] compile_backend"),
    ],
)
@pytest.mark.parametrize("setting", ["expert_parallel", "tensor_parallel"])
def test_divided_layers_are_refused_with_unsupported_settings(
    refuse, setting: str, other: str, name: str
) -> None:
    message = refuse("", "trainer.ranks=2", f"trainer.{setting}=2", other)
    assert f"{setting} = 2 does not work with {name}" in message
    assert f"remove {name}" in message


def test_numbers_of_ranks_that_do_not_divide_are_refused(refuse) -> None:
    for setting in ("context_parallel", "expert_parallel", "tensor_parallel"):
        message = refuse("", "trainer.ranks=3", f"trainer.{setting}=2")
        assert f"3 trainer ranks are not a multiple of [trainer] {setting} = 2" in message
    message = refuse(
        "", "trainer.ranks=4", "trainer.tensor_parallel=2", "trainer.context_parallel=2"
    )
    assert "tensor_parallel = 2 does not work with context_parallel = 2" in message


def test_an_interpreter_for_the_embedded_engine_is_refused(refuse) -> None:
    assert 'engine = "vllm"' in refuse(f'[inference]\npython = "{sys.executable}"\n')


def test_model_unsupported_for_vllm_training_is_refused(refuse, tmp_path: Path) -> None:
    write_tiny("kimi_k25", tmp_path / "kimi", seed=0)
    file = tmp_path / "kimi" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    file.write_text(json.dumps(config))
    message = refuse('[inference]\nengine = "vllm"\n', model=tmp_path / "kimi")
    assert "quantized weights" in message and 'engine = "torch"' in message


@pytest.mark.thorough
def test_command_finds_an_environment_next_to_the_run_file(tmp_path: Path) -> None:
    """As a person calls it: the installed script, which Python gives its own folder to search."""
    (tmp_path / "mine.py").write_text(
        "from sightline import Environment\nclass Mine(Environment):\n    name = 'mine'\n"
    )
    (tmp_path / "run.toml").write_text('[model]\npath = "none"\n[env]\nname = "mine:Mine"\n')
    script = Path(sys.executable).with_name("sightline")
    done = subprocess.run([script, "rl", "run.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no module" not in done.stderr and "'none'" in done.stderr


def test_conflicting_settings_of_a_section_are_named(refuse) -> None:
    message = refuse("", "inference.servers=['127.0.0.1:8000']")
    assert "[inference]: servers has a URL without http://" in message
    assert "max_model_len" not in message, "the section is not spelled out"


def test_overrides_without_a_run_file_are_not_parsed_as_its_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rl", "run.seed=1"]) == 2
    assert "pass one before the settings" in capsys.readouterr().err


def test_unreachable_store_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    file = run_file(tmp_path, media={"root": nobody, "cache_dir": str(tmp_path)})
    with pytest.raises(MediaError, match=f"{nobody} is not available") as caught:
        check_store(file, RunDir(tmp_path), deadline_s=0.1)
    assert "[media] root" in caught.value.fix
    assert not (tmp_path / "media").exists()


def test_paths_of_environments_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    args = {"path": "rows.jsonl", "eval_path": "owner/name", "prompt": "rows.jsonl"}
    absolute = args | {"path": str(tmp_path / "rows.jsonl")}
    values = {"model": {"path": "m"}, "env": {"name": "dataset", "args": args}}
    resolved = resolve_paths(RunFile.model_validate(values)).env
    assert resolved.args == absolute
    mix = {"mix": [{"name": "dataset", "args": args}, {"name": "color_codeword"}]}
    resolved = resolve_paths(RunFile.model_validate(values | {"env": mix})).env
    assert [entry.args for entry in resolved.mix] == [absolute, {}]


def test_store_address_is_kept_verbatim_without_a_password(refuse) -> None:
    for root in ("s3://bucket/images", "https://host:8100"):
        values = {"model": {"path": "m"}, "env": {"name": "e"}, "media": {"root": root}}
        assert resolve_paths(RunFile.model_validate(values)).media.root == root
    message = refuse("", "media.root=http://me:word@host:8100")
    assert "a URL with a password" in message and "word@" not in message
