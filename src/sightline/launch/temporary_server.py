"""A server in a process of its own, for as long as a command needs one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sightline.errors import ProcessFailed
from sightline.launch.processes import build_environ


def start_sightline(words: Sequence[str], threads: int) -> subprocess.Popen[str]:
    """`sightline WORDS`, with its output to be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "sightline", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=build_environ(threads),
    )


@contextlib.contextmanager
def temporary_server(
    model: Path, media: Path, more: Sequence[str] = (), threads: int = 1
) -> Iterator[str]:
    """The address of a server; `more` are options of `sightline serve`."""
    words = ["serve", str(model), "--media", str(media), "--port", "0", "--threads", str(threads)]
    process = start_sightline([*words, *more], threads)
    try:
        assert process.stdout is not None
        # An engine that is not ours may have something to say before.
        listening = next((line for line in process.stdout if line.startswith("serving ")), "")
        if not listening:
            raise ProcessFailed("the server ended while it started", "see its output above")
        yield listening.split()[-1]
    finally:
        process.terminate()
        process.communicate()
