"""vLLM servers that the tests of a session share: one takes a minute to start.

`python` is the interpreter that has vLLM (`--vllm PATH`). Without one the embedded engine serves.
`shards` are settings of how it shares its work (`--shards`).
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sightline.inference.server_spec import ServerSpec

python = ""
shards: dict[str, int] = {}
patience = 1.0
"""Scales every time limit (`--patience`)."""
START_S = 600.0
"""Time limit of a server's start."""
REPORT_EVERY_S = 30.0
report: Callable[[str], object] = print
"""Shows how far the start of a server is."""
HOOKS = Path(__file__).parent / "vllm" / "hooks"
_servers: dict[str, Server] = {}


@dataclass
class Server:
    settings: ServerSpec
    process: subprocess.Popen[bytes]
    folder: Path
    is_ready: bool = False
    weights: list[Path] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def wait(self, path: str = "/health", name: str = "status") -> None:
        began, num_reports, start_s = time.monotonic(), 0, scale_s(START_S)
        while not self.is_ready:
            log, waited_s = self.log.read_text(errors="replace"), time.monotonic() - began
            assert self.process.poll() is None, log[-6000:]
            assert waited_s < start_s, f"not ready in {start_s:g} s (--patience): {log[-6000:]}"
            if waited_s > (num_reports + 1) * REPORT_EVERY_S:
                num_reports += 1
                last = (log.splitlines() or [""])[-1][-120:]
                report(f"vLLM starts since {waited_s:.0f} of {start_s:g} s: {last}")
            try:
                self.is_ready = bool(self.call("GET", path)[name])
            except OSError:
                time.sleep(0.2)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.settings.inference.port, timeout=60
        )
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, data
        return json.loads(data)

    def go_back(self) -> None:
        """Restore the checkpoint's weights, as version 0."""
        if self.call("GET", "/health")["version"] != "0":
            self.call("POST", "/sightline/v1/adopt", {"manifest": str(self._first_weights())})

    def _first_weights(self) -> Path:
        if not self.weights:
            from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

            from sightline.compute.weights import write_weights
            from sightline.families import load_family

            folder = self.settings.model.path
            shows_media = load_family(folder).shows_media
            auto = AutoModelForImageTextToText if shows_media else AutoModelForCausalLM
            model = auto.from_pretrained(folder, local_files_only=True)
            path, _ = write_weights(self.folder, dict(model.named_parameters()), 0, 0)
            self.weights.append(path)
        return self.weights[0]


def start(settings: ServerSpec) -> Server:
    """Return a server with `settings`: a running one, or one that begins to load."""
    from sightline.inference.vllm_plugin import LOGITS_PROCESSOR, MIDDLEWARE
    from sightline.inference.vllm_plugin.command import build_vllm_command, build_vllm_environ
    from sightline.launch.processes import reserve_port

    name = settings.model_dump_json()
    if name not in _servers:
        settings = settings.replace(
            port=reserve_port("127.0.0.1", 0, "port"), engine="vllm", **shards
        )
        folder = Path(tempfile.mkdtemp(prefix="sightline-vllm-"))
        words = build_vllm_command(settings, os.path.abspath(python))
        # In addition to ours, one that records the vision tower's inputs.
        words.insert(words.index(LOGITS_PROCESSOR) + 1, "seen_by_tower:Watch")
        # Inside our own middleware, one that records the requests to vLLM's application.
        at = words.index(MIDDLEWARE) - 1
        words[at:at] = ["--middleware", "reached.Watch"]
        path = os.pathsep.join([str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(folder / "server.log", "wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=build_vllm_environ(settings.inference.device, 1) | {"PYTHONPATH": path},
            )
        _servers[name] = Server(settings, process, folder)
    return _servers[name]


def forget(server: Server) -> None:
    """A test ended the server. The next test that needs it gets a new one."""
    for name in [name for name, other in _servers.items() if other is server]:
        del _servers[name]


def scale_s(seconds: float) -> float:
    """Return a time limit, scaled by `--patience`."""
    return seconds * patience


@contextmanager
def lend(settings: ServerSpec) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the port and totals of an idle server with the checkpoint's weights."""
    server = start(settings)
    server.wait()
    server.go_back()
    try:
        yield server.settings.inference.port, server.call("GET", "/sightline/v1/stats")["totals"]
    finally:
        if server.process.poll() is None:
            server.go_back()


def end_all() -> None:
    for server in _servers.values():
        server.process.terminate()
    for server in _servers.values():
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    _servers.clear()
