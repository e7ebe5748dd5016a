"""`sightline samples`, as a process that is ended while it uploads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_run import SyntheticSize, write_synthetic_run

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_an_upload_that_is_ended(tmp_path: Path, number: int) -> None:
    run_dir = write_synthetic_run(
        tmp_path / "run-001", SyntheticSize(steps=1, rollouts_per_step=4, images=2, conversations=2)
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/bucket/"
        process = subprocess.Popen(
            [sys.executable, "-m", "sightline", "samples", run_dir.path, "--to", address],
            env={**os.environ, "TMPDIR": str(scratch)},
            stderr=subprocess.DEVNULL,
            # Whoever started the tests may ignore it, and so would this process.
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        connection, _ = server.accept()  # and never answers
        assert list(scratch.rglob("*.parquet"))
        process.send_signal(number)
        assert process.wait(60) != 0
        connection.close()
    assert not list(scratch.iterdir())
