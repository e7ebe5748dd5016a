"""The command: refusals before anything loads, and an end in order."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Client

from sightline.cli.main import main
from sightline.errors import ConfigError
from sightline.inference.serve import bind_socket


def test_a_taken_port_is_refused_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as caught:
            bind_socket("127.0.0.1", port)
    assert "another port" in caught.value.fix


def test_the_command_refuses_a_taken_port_before_it_looks_at_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["serve", str(tmp_path / "none"), "--media", str(tmp_path), "--port", port]
        assert main(words) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", str(tmp_path), "--engine", "other", "--media", str(tmp_path)]) == 2
    assert "torch" in capsys.readouterr().err


def test_a_served_checkpoint_answers_and_ends_in_order_on_sigterm(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = ["serve", str(tiny_model), "--media", str(tmp_path), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sightline", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1].removeprefix("http://")
        client = Client(address.split(":")[0], int(address.split(":")[1]))
        assert client.get("/health")["version"] == "0"
        assert len(client.generate([1, 2, 3]).choices[0].token_ids) == 8
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
