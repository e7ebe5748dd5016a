"""The command: refusals before anything loads, and a clean shutdown."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Client

from sightline.cli.main import build_parser, main
from sightline.config import InferenceConfig, ModelConfig
from sightline.inference.server_spec import ServerSpec
from sightline.transport.listen import describe_link

TOKEN = "a token of sixteen letters or more"


def test_serve_refuses_a_port_in_use_before_loading_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["serve", str(tmp_path / "none"), "--media", str(tmp_path), "--port", port]
        assert main(words) == 2
    assert "cannot listen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["--max-model-len", "1"], "max_model_len"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--port", "99999"], "port"),
        (["--pixel-cache-mb", "-1"], "pixel_cache_mb"),
        (["--max-waiting", "-1"], "max_waiting"),
        (["--dtype", "float8"], "dtype"),
    ],
)
def test_serve_options_have_the_run_files_bounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], setting: str
) -> None:
    assert main(["serve", str(tmp_path), "--media", str(tmp_path), *words]) == 2
    assert setting in capsys.readouterr().err


def serve_options() -> list[argparse.Action]:
    [commands] = [a for a in build_parser(["serve"])._actions if isinstance(a.choices, dict)]
    return list(commands.choices["serve"]._actions)  # type: ignore[index]


def test_every_serve_option_is_named_after_a_setting() -> None:
    names = {action.dest for action in serve_options()} - {"help", "debug"}
    known = {*ServerSpec.model_fields, *ModelConfig.model_fields, *InferenceConfig.model_fields}
    assert names <= known


def test_link_uses_the_given_address() -> None:
    assert describe_link("127.0.0.1", 80, "/?token=a") == "http://127.0.0.1:80/?token=a"
    assert describe_link("::1", 80) == "http://[::1]:80"


def test_served_checkpoint_answers_and_stops_cleanly_on_sigterm(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Serve on all interfaces without an image folder. The printed address and folder work."""
    words = ["serve", str(tiny_model), "--host", "0.0.0.0", "--port", "0", "--device", "cpu"]
    words += ["--token", "env:TOKEN"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sightline", *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "TOKEN": TOKEN},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert f"images are stored in {tmp_path}/sightline-serve-" in process.stdout.readline()
        address = process.stdout.readline().split()[-1].removeprefix("http://")
        assert "all interfaces (0.0.0.0)" in process.stdout.readline() and "0.0.0.0" not in address
        client = Client("127.0.0.1", int(address.split(":")[1]), token=TOKEN)
        for path in ("/inference/v1/generate", "/sightline/v1/adopt", "/v1/chat/completions"):
            assert Client(client.host, client.port).call("POST", path, b"{}")[0] == 401
        assert client.get("/health")["version"] == "0"
        for token in ("", "a guess"):  # all that a load balancer needs, and nothing of the run
            stranger = Client("127.0.0.1", int(address.split(":")[1]), token=token)
            assert stranger.get("/health") == {"status": "ok"}
        assert len(client.generate([1, 2, 3]).choices[0].token_ids) == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not list(tmp_path.glob("sightline-serve-*")), "the folder is temporary"
    finally:
        process.kill()
        process.communicate()
