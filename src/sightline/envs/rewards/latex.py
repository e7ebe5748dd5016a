"""The reward for mathematics in LaTeX, with the library math-verify.

A short answer may ask for a huge computation, and the library's time limits need a main thread. It
therefore runs in a child process, which is this file run by its path.

    LatexMath --request--> child
      waits for: its reply      unblocked by: its end, at the latest at its CPU time limit
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, cast

from sightline.bounded_child import build_command, limit_cpu, read_frame, write_frame
from sightline.envs.protocol import import_extra
from sightline.envs.rewards.text import list_accepted

MEMORY_BYTES = 1 << 30


class LatexMath:
    """Returns 1 if the answer's last expression equals the reference, as 1/2 equals 0.5.

    A comparison that takes more than `cpu_s` seconds of CPU time, or too much memory, earns 0.
    """

    def __init__(self, cpu_s: int = 5) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._cpu_s = cpu_s
        if find_spec("math_verify") is None:
            import_extra("math_verify", "rewards")  # raises

    def __call__(self, answer: str, expected: Any) -> float:
        request = {"answer": answer, "expected": [str(value) for value in list_accepted(expected)]}
        with self._lock:
            reply = self._ask(request)
        if "problem" in reply:
            raise ValueError(reply["problem"])
        return float(reply["is_equal"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._start()
        process = self._process
        try:
            write_frame(cast(BinaryIO, process.stdin), request)
            return read_frame(cast(BinaryIO, process.stdout))
        except (OSError, EOFError):
            self.close()
            return {"is_equal": False}

    def close(self) -> None:
        """End the child. The next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        file = Path(__file__).absolute()
        return subprocess.Popen(
            build_command(file, str(self._cpu_s), cpu_s=0, memory_bytes=MEMORY_BYTES),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)},
        )


def compare(answer: str, accepted: list[str]) -> dict[str, Any]:
    """Compare an answer with references, in the child."""
    from math_verify import parse, verify

    # `answer_pattern = "boxed"` removes the delimiters. Of other text, the parser takes a number.
    is_sentence = re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+(\{[A-Za-z ]*\})?", "", answer))
    is_expression = not is_sentence and re.search(r"[A-Za-z\\^({[]", answer)
    given = parse(_delimit(answer) if is_expression else answer, parsing_timeout=None)
    for text in accepted:
        reference = parse(_delimit(text), parsing_timeout=None)
        if not reference:
            return {"problem": f"the reference {text!r} has no expression"}
        if verify(reference, given, timeout_seconds=None):
            return {"is_equal": True}
    return {"is_equal": False}


def _delimit(text: str) -> str:
    """Mark an expression as LaTeX: the parser looks for LaTeX in its delimiters only."""
    return text if re.search(r"(?<!\\)\$|\\boxed|\\\(|\\\[", text) else f"${text}$"


def serve(cpu_s: int) -> None:
    """Answer requests at standard input until it closes."""
    import_extra("math_verify", "rewards")  # before the time of the first comparison counts
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no reply
    with suppress(EOFError):
        while True:
            request = read_frame(sys.stdin.buffer)
            limit_cpu(cpu_s)
            write_frame(replies, compare(request["answer"], request["expected"]))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
