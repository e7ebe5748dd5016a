"""Secrets are references: no file, output or list contains one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline import config
from sightline.cli.main import main
from sightline.config import (
    EnvConfig,
    RunFile,
    SftFile,
    dump_toml,
    load_config,
    validate_config,
)
from sightline.config.secret_refs import hide_secrets, resolve_secret
from sightline.envs import Environment
from sightline.envs.judge_model import JudgeModel
from sightline.envs.protocol import build_environment
from sightline.envs.tools import Toolbox, ToolError
from sightline.errors import ConfigError, mask
from sightline.inference.server_spec import ServerSpec
from sightline.launch.claim import SECRET_VARIABLE, claim_run_dir, make_secret, read_secret
from sightline.launch.processes import Processes, ProcessSpec
from sightline.message import AssistantMessage, ToolCall
from sightline.rollout.client import GenerateClient
from sightline.run import RunDir
from sightline.run.rights import derive_rights
from sightline.view.dashboard.run_collection import RunCollection
from sightline.view.dashboard.server import build_app
from sightline.view.report import write_report

KEY = "sk-7d1f0a-never-to-be-seen"


class Judged(Environment):
    name = "judged"

    def __init__(self, api_key: str = "", judges: Any = (), path: str = "") -> None:
        self.api_key, self.judges, self.path = api_key, judges, path


JUDGED = f"{__name__}:Judged"


def values(**args: Any) -> dict[str, Any]:
    return {"model": {"path": "m"}, "env": {"name": JUDGED, "args": args}}


@pytest.mark.parametrize(
    "args",
    [
        {"api_key": KEY}, {"judges": [{"url": "u", "token": KEY}]}, {"judges": {"password": [KEY]}},
        {"judges": {"headers": {"Authorization": KEY}}}, {"apiKey": KEY}, {"client-secret": KEY},
    ],
)  # fmt: skip
def test_a_secret_in_a_run_file_is_refused_and_not_repeated(args: dict[str, Any]) -> None:
    mixed = {"model": {"path": "m"}, "env": {"mix": [{"name": JUDGED, "args": args}]}}
    for settings in (values(**args), mixed):
        with pytest.raises(ConfigError, match="this is a secret") as refused:
            validate_config(RunFile, settings, "run.toml")
        assert "env:NAME" in str(refused.value) and KEY not in str(refused.value)


def test_secret_reference_is_resolved_when_the_environment_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(f"{KEY}2\n")
    args = {"api_key": "env:MY_KEY", "judges": [{"token": f"file:{tmp_path / 'key'}"}]}
    file = validate_config(RunFile, values(**args), "run.toml")
    with pytest.raises(
        ConfigError, match=r"\[env\] args.api_key = 'env:MY_KEY': the variable is not set"
    ):
        build_environment(file.env)
    monkeypatch.setenv("MY_KEY", KEY)
    built: Any = build_environment(file.env)
    assert built.api_key == KEY and built.judges == [{"token": f"{KEY}2"}]
    assert KEY not in dump_toml(file) and "env:MY_KEY" in dump_toml(file)
    assert KEY not in repr(file)
    with pytest.raises(ConfigError, match="--token = 'file:.*gone' cannot be read"):
        resolve_secret(f"file:{tmp_path / 'gone'}", "--token")
    (tmp_path / "key").write_text("\n")
    with pytest.raises(ConfigError, match=r"judges\[0\].token = 'file:.*key': the file is empty"):
        build_environment(file.env)
    monkeypatch.setenv("MY_KEY", "")
    with pytest.raises(ConfigError, match="the variable is empty"):
        build_environment(file.env)


@pytest.mark.parametrize("value", ["ENV:MY_KEY", "$MY_KEY", "${MY_KEY}", "env:", KEY])
@pytest.mark.parametrize("section", [{"token": ""}, {"args": {"api_key": ""}}])
def test_invalid_secret_reference_is_refused_with_the_expected_form(
    value: str, section: Any
) -> None:
    settings = values(api_key=value) if "args" in section else values()
    settings |= {} if "args" in section else {"inference": {"token": value}}
    with pytest.raises(ConfigError) as refused:
        validate_config(RunFile, settings, "run.toml")
    assert refused.value.fix.startswith("write env:NAME") and value not in refused.value.problem


@pytest.mark.parametrize(
    ("section", "fix"),
    [
        ({"servers": ["127.0.0.1:8000"]}, "http://127.0.0.1:8000"),
        ({"servers": [f"me:{KEY}@host:1"]}, "http://HOST:PORT"),
        ({"servers": [f"http://me:{KEY}@host:1"]}, "[inference] token"),
        ({"servers": ["http://a:1", "http://a:1"]}, "list each server once"),
    ],
)
def test_conflicting_settings_have_their_own_fix(section: Any, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_config(RunFile, {**values(), "inference": section}, "run.toml")
    assert fix in refused.value.fix and KEY not in str(refused.value)


@pytest.mark.parametrize("kind", [RunFile, SftFile])
def test_unknown_secret_setting_is_refused_without_its_value(kind: Any) -> None:
    settings = {**values(), "trainer": {"secret": KEY}}
    settings |= {"sft": {"output_dir": "o"}} if kind is SftFile else {}
    with pytest.raises(ConfigError, match=r"unknown key \[trainer\] secret") as refused:
        validate_config(kind, settings, "run.toml")
    assert KEY not in str(refused.value)


def test_a_secret_in_an_override_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "m"\n[env]\nname = "{JUDGED}"\n')
    for word in ("trainer.secret", "env.args.api_key", "inference.token"):
        with pytest.raises(ConfigError) as refused:
            config.load_config(RunFile, path, [f"{word}={KEY}"])
        assert KEY not in str(refused.value) and word in str(refused.value)


def test_server_address_may_not_hold_a_password() -> None:
    section = {"inference": {"servers": [f"http://me:{KEY}@host:1"]}}
    with pytest.raises(ConfigError):
        validate_config(RunFile, {**values(), **section}, "run.toml")


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{KEY}@judge.example/v1", f"https://{KEY}@judge.example",
        f"https://judge.example/v1?model=m&api_key={KEY}", f"https://judge.example?sig={KEY}",
        f"https://judge.example?X-Amz-Signature={KEY}", f"see redis://:{KEY}@db/0",
    ],
)  # fmt: skip
def test_address_containing_a_secret_is_refused_and_not_repeated(url: str) -> None:
    for args in ({"judges": url}, {"judges": [{"url": url}]}, {"judges": {"urls": [url]}}):
        with pytest.raises(ConfigError, match="URL contains a secret") as refused:
            validate_config(RunFile, values(**args), "run.toml")
        assert "env:NAME" in str(refused.value) and KEY not in str(refused.value)
    old = f'[env.args]\nurl = "{url}"\nother = "https://judge.example/v1"\n'
    assert hide_secrets(old) == old.replace(url, "env:HIDDEN")


# --- secrets that were read are masked


@pytest.fixture
def has_read_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sightline.errors._masked", ())
    monkeypatch.setenv("MY_KEY", KEY + "/ä")
    resolve_secret("env:MY_KEY", "api_key")


@pytest.mark.usefixtures("has_read_key")
def test_tool_error_shown_to_the_model_masks_secrets() -> None:
    def look() -> str:
        """Looks."""
        raise ToolError(f"401 for {KEY}/ä")

    call = AssistantMessage("assistant", tool_calls=(ToolCall("look", "{}"),))
    (answer,) = asyncio.run(Toolbox(look).run(call, put=lambda image: image))
    assert answer.text == "error: 401 for ***"


def test_a_process_that_fails_prints_no_secret(tmp_path: Path) -> None:
    """Errors in a thread and at the end. `[rollout] python` builds an environment the same way."""
    (tmp_path / "raising.py").write_text(
        "import threading\n"
        "class Raising:\n"
        "    def __init__(self, api_key):\n"
        "        def fail(): raise ValueError(f'401 for key {api_key}')\n"
        "        thread = threading.Thread(target=fail)\n"
        "        thread.start(), thread.join()\n"
        "        print('its key is', api_key, flush=True)\n"
        "        fail()\n"
    )
    env = EnvConfig(name="raising:Raising", args={"api_key": "env:MY_KEY"})
    done = subprocess.run(
        [sys.executable, "-m", "sightline.envs.environment_info"],
        input=env.model_dump_json(), cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "MY_KEY": KEY},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert KEY not in output and output.count("***") == 3, output


# --- the secret of a run


def test_run_secret_is_private_and_persistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    run_dir = claim_run_dir(str(tmp_path / "runs"), "r")
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(run_dir)
    before = os.umask(0)
    try:
        secret = make_secret(run_dir)
    finally:
        os.umask(before)
    assert stat.S_IMODE(run_dir.secret.stat().st_mode) == 0o600
    assert len(secret) == 64 and make_secret(run_dir) == read_secret(run_dir) == secret
    other = claim_run_dir(str(tmp_path / "runs"), "r")
    assert make_secret(other) != secret
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ConfigError, match="only .* characters"):
        make_secret(run_dir)
    monkeypatch.setenv(SECRET_VARIABLE, KEY)
    assert read_secret(RunDir(tmp_path / "of another machine")) == KEY
    assert make_secret(run_dir) == KEY == run_dir.secret.read_text()
    monkeypatch.setenv(SECRET_VARIABLE, f"{KEY}\n")  # as files of secrets end
    assert read_secret(run_dir) == KEY == make_secret(run_dir)
    assert derive_rights(f"{KEY}\n", "trainer") == derive_rights(KEY, "trainer")


def test_run_servers_require_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    run_dir = claim_run_dir(str(tmp_path), "r")
    run_dir.make()
    run_dir.config.write_text(dump_toml(validate_config(RunFile, values(), "run.toml")))
    secret, address = make_secret(run_dir), "http://127.0.0.1:9"
    for name in ("server", "evaluator"):
        started: list[ServerSpec] = []

        def record(spec: ServerSpec, build_engine: object, to: list[ServerSpec] = started) -> None:
            to.append(spec)

        monkeypatch.setattr("sightline.inference.serve.serve", record)
        words = ["process", name, str(run_dir.path), "--server", address, "--evaluator", address]
        assert main(words) == 0
        rights = derive_rights(secret, name)
        inference = started[0].inference
        assert resolve_secret(inference.token, "--token") == rights.token
        assert resolve_secret(inference.control_token, "--control-token") == rights.control_token
        assert started[0].weights_root == run_dir.weights


def test_remote_process_gets_only_its_own_credentials(tmp_path: Path) -> None:
    run_dir = claim_run_dir(str(tmp_path), "r")
    run_dir.make()
    secret, processes = make_secret(run_dir), Processes(run_dir)
    keeper = "import sys; open(sys.argv[-1], 'w').write(sys.stdin.readline())"
    rights = {}
    for name in ("worker-0", "worker-1", "trainer", "server"):
        file = tmp_path / name
        host = [sys.executable, "-c", keeper, "--"]
        processes.start(ProcessSpec(name, ["process", name, str(file)], 1, host=host))
        while (code := processes.exit_code(name)) is None:
            time.sleep(0.01)
        assert code == 0
        processes._running[name].stdin.close()  # type: ignore[union-attr]
        text = file.read_text().strip()
        assert secret not in text
        rights[name] = derive_rights(text, name)
        assert rights[name] == derive_rights(secret, name)
    worker, other, trainer, server = rights.values()
    assert len({right.channel for right in rights.values()}) == 4, "each speaks under its own name"
    assert worker.token == other.token == server.token
    assert not (worker.control_token or worker.ranks or trainer.control_token or server.ranks)
    assert len({secret, server.token, server.control_token, trainer.ranks}) == 4


def test_files_and_output_of_a_run_hold_no_secret(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    run_dir = write_synthetic_run(
        tmp_path / "run-001", SyntheticSize(steps=1, rollouts_per_step=4, images=2, conversations=2)
    )
    settings = values(api_key="env:MY_KEY")
    settings["model"]["path"] = str(tiny_model)
    settings["inference"] = {"servers": ["http://127.0.0.1:1"], "token": "env:MY_KEY"}
    run_dir.config.write_text(dump_toml(validate_config(RunFile, settings, "run.toml")))
    pages = check_shows_nothing(run_dir, (make_secret(run_dir), KEY))
    assert "env:MY_KEY" in pages


def check_shows_nothing(run_dir: RunDir, hidden: tuple[str, ...]) -> str:
    """Return the text of report and dashboard.

    Check that no file of the run, except its secret, contains any of `hidden`.
    """
    write_report(run_dir)
    runs = RunCollection([run_dir.path])
    with TestClient(build_app(runs), base_url="http://127.0.0.1") as web:
        key = web.get("/api/runs").json()[0]["key"]
        pages = ["/api/runs", "/metrics", f"/api/settings?run={key}", f"/api/processes?run={key}"]
        page_text = "".join(web.get(page).text for page in pages)
        assert web.get(f"/api/log?run={key}&name=../secret").status_code == 404
    for text in hidden:
        assert text not in page_text
        for file in run_dir.path.rglob("*"):
            if file.is_file() and file != run_dir.secret:
                assert text.encode() not in file.read_bytes(), file
    return page_text


def test_secrets_written_by_an_earlier_version_are_not_shown(
    tmp_path: Path, tiny_model: Path
) -> None:
    size = SyntheticSize(steps=1, rollouts_per_step=4, images=2, conversations=2)
    run_dir = write_synthetic_run(tmp_path / "run-001", size)
    settings = {**values(), "model": {"path": str(tiny_model)}}
    text = dump_toml(validate_config(RunFile, settings, "run.toml"))
    text += f'\n[env.args]\napi_key = \'{KEY}\'\njudges = [{{"x-token" = "{KEY}"}}]\n'
    old = text.replace("[env.args]\n\n", "")
    run_dir.config.write_text(f"# sha256 {hashlib.sha256(old.encode()).hexdigest()}\n{old}")
    config = load_config(RunFile, run_dir.config)
    assert config.env.args == {"api_key": "env:HIDDEN", "judges": [{"x-token": "env:HIDDEN"}]}
    assert KEY not in hide_secrets(old)
    report = write_report(run_dir).read_text()
    assert KEY not in report and "env:HIDDEN" in report


# --- the command line


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "color_codeword", "--endpoint", "http://127.0.0.1:9/v1", "--api-key", KEY],
        ["view", ".", f"--token={KEY}"],
        ["serve", "model", "--token", KEY],
    ],
)
def test_no_command_accepts_a_secret_as_an_argument(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert "env:NAME" in errors and "file:PATH" in errors and KEY not in errors


@pytest.mark.parametrize("command", [["view", "."], ["serve", "."]])
def test_no_command_serves_off_loopback_without_a_token(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--token env:NAME" in " ".join(capsys.readouterr().err.split())


def test_repr_of_clients_hides_the_key() -> None:
    assert KEY not in repr(JudgeModel("http://judge", "m", KEY))
    assert KEY not in repr(GenerateClient("http://server", token=KEY))


@pytest.mark.usefixtures("has_read_key")
def test_error_masks_resolved_secrets() -> None:
    spelled = f"{KEY}/ä, {KEY + '/ä'!r}, ?key={KEY}%2F%C3%A4"
    assert str(ConfigError(spelled, KEY + "/ä")) == "***, '***', ?key=***\n  fix: ***"
    resolve_secret("short", "api_key")
    assert mask("a short word") == "a short word"
