"""Details of a vLLM server: names that may move, closed paths, its shutdown, and the settings that
are refused before it starts.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import vllm_servers
from agents import shown
from serving import Client, Reference, live

from sightline.errors import ConfigError
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin.command import check_python
from sightline.message import user
from sightline.wire.generate import GenerateRequest, SamplingParams


def run(python: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True,
        timeout=vllm_servers.scale_s(300), check=False, cwd="/",
    )  # fmt: skip


def test_every_imported_vllm_name_exists(python: str) -> None:
    done = run(python, "import sightline.inference.vllm_plugin.symbols")
    assert done.returncode == 0, done.stderr


def test_no_request_reaches_vllms_own_application(
    client: Client, settings: ServerSpec, reference: Reference
) -> None:
    """A second middleware inside ours records all requests that pass it."""
    request = {"messages": [shown(3)], "max_tokens": 3}
    for body in (request, {**request, "stream": True}, {**request, "max_tokens": "many"}):
        status, _, _ = client.call("POST", "/v1/chat/completions", msgspec.json.encode(body))
        assert status == (400 if body["max_tokens"] == "many" else 200)
    client.generate(reference.renderer.render([user("Hello.")]).token_ids)
    client.get("/v1/models")
    reached = vllm_servers.start(settings).folder / "reached"
    assert reached.read_text().split() == ["lifespan"]


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/responses/x", "/tokenize", "/invocations",
     "/v1/chat/completions/render", "/pause", "/update_weights", "/docs", "/v1/messages",
     "/inference/v1/abort_requests"],
)  # fmt: skip
def test_vllm_handlers_are_not_reachable(client: Client, path: str) -> None:
    """These routes would process images in their own way, or change weights unnoticed."""
    for method in ("GET", "POST"):
        status, body, _ = client.call(method, path, b"{}" if method == "POST" else None)
        assert status == 404 and b'"unknown_url"' in body


def test_sampling_parameters_unsupported_by_vllm_are_refused(
    client: Client, reference: Reference
) -> None:
    tokens = reference.renderer.render([user("Hello.")]).token_ids
    for params, path in (
        (SamplingParams(prompt_logprobs=0), "sampling_params.prompt_logprobs"),
        (SamplingParams(temperature=2.5), "sampling_params.temperature"),
        (SamplingParams(temperature=0.005), "sampling_params.temperature"),
    ):
        error = client.refused(msgspec.json.encode(GenerateRequest.of(tokens, [], params)))
        assert (error.code, error.type, error.path) == (400, "sampling", path)


def test_interpreter_without_vllm_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vLLM is not installed") as caught:
        check_python(sys.executable)
    assert "docs/vllm.md" in caught.value.fix
    with pytest.raises(ConfigError, match="is not an interpreter"):
        check_python(str(tmp_path / "python"))


def test_an_interpreter_without_sightline_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    fake = tmp_path / "bare"
    fake.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {tmp_path}/v/bin/python "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(ConfigError, match="sightline"):
        check_python(str(fake))


def test_requests_in_flight_get_503_when_the_server_stops(
    odd_settings: ServerSpec, reference: Reference
) -> None:
    refusals: list[Any] = []
    rendered = reference.renderer.render([user("Hello.")])
    request = GenerateRequest.of(rendered.token_ids, [], SamplingParams(max_tokens=4000))
    body = msgspec.json.encode(request)
    with live(odd_settings) as ending:
        server = vllm_servers.start(odd_settings)
        children = _children(server.process.pid)
        assert len(children) >= 2
        thread = threading.Thread(target=lambda: refusals.append(ending.refused(body)))
        thread.start()
        ending.wait_for("now", "running", 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(vllm_servers.scale_s(60)) == 0
        vllm_servers.forget(server)
    thread.join(vllm_servers.scale_s(20))
    assert (refusals[0].code, refusals[0].type) == (503, "stopping")
    _wait_gone(children)


def _children(pid: int) -> list[int]:
    """Return the PIDs of a process's children and of their descendants."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                pids += [int(folder.name), *_children(int(folder.name))]
    return pids


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + vllm_servers.scale_s(60)
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and _is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}") / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
