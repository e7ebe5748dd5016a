"""Render a checkpoint's own chat template like transformers, in a child process with limits.

A template comes with a model and may be hostile, so no process of a run compiles or renders one.

    ChatTemplate --values--> child: jinja's sandbox, limits on time and memory
                 <---text---
      waits for: the child's answer     unblocked by: the answer, the child's end, a deadline

A process starts its child for its first template, and again whenever the child has ended.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from cachetools import LRUCache

from sightline.bounded_child import build_command, build_variables, read_frame, write_frame
from sightline.errors import FamilyError
from sightline.regular_file import read_text

CPU_S = 3
"""Processor time for one rendering. It takes milliseconds."""
MEMORY_BYTES = 1 << 29
DEADLINE_S = 120.0
"""Deadline for an answer, far above `CPU_S` because the machine may be busy."""
MAX_TEMPLATES = 16
"""Templates that a child keeps compiled."""
MAX_SOURCE_CHARS = 1 << 20
MAX_KEPT_CHARS = 1 << 22
"""Characters of renderings that a template keeps."""
_FIX = "use the chat template that was published with the checkpoint"


class TemplateError(FamilyError):
    """A chat template is not valid, or does not render these messages within its limits."""


class ChatTemplate:
    """A chat template of a model. Thread-safe."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"it has more than {MAX_SOURCE_CHARS} characters", _FIX)
        self.source = source
        self._key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        # Most renderings of a rollout are of marks in place of texts, and repeat.
        self._texts: LRUCache[bytes, str] = LRUCache(MAX_KEPT_CHARS, getsizeof=len)
        self._repeats = "strftime_now" not in source
        self._lock = threading.Lock()
        self._ask(None)

    @classmethod
    def find(cls, path: Path) -> ChatTemplate | None:
        """Load the template of a checkpoint folder, or return None if it has none."""
        source = _find_source(path)
        if source is None:
            return None
        try:
            return cls(source)
        except TemplateError as error:
            problem = f"{path}: the chat template is not valid jinja: {error.problem}"
            raise FamilyError(problem, error.fix) from error

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
        **settings: Any,
    ) -> str:
        values = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": generation_prompt,
            **settings,
        }
        if not self._repeats:
            return self._ask(values)
        digest = hashlib.sha256(json.dumps(values).encode()).digest()
        with self._lock:
            text = self._texts.get(digest)
        if text is None:
            text = self._ask(values)
            if len(text) <= MAX_KEPT_CHARS:
                with self._lock:
                    self._texts[digest] = text
        return text

    def _ask(self, values: dict[str, Any] | None) -> str:
        """Return the text for `values`. Without them, only check that the template is valid."""
        return _get_child().ask(self._key, self.source, values)


class TemplateChild:
    """A child of this process, which renders templates. Thread-safe."""

    def __init__(self, cpu_s: int = CPU_S, deadline_s: float = DEADLINE_S) -> None:
        self.owner = os.getpid()
        self._cpu_s, self._deadline_s = cpu_s, deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: BinaryIO
        self._sent: set[str] = set()
        """Keys of the templates that the child has."""
        atexit.register(self._stop)

    def ask(self, key: str, source: str, values: dict[str, Any] | None) -> str:
        request = {"key": key} if values is None else {"key": key, "values": values}
        with self._lock:
            answer = self._exchange(key, source, request)
        if "problem" in answer:
            raise TemplateError(answer["problem"], _FIX)
        return str(answer["text"])

    def _exchange(self, key: str, source: str, request: dict[str, Any]) -> dict[str, Any]:
        while True:
            if len(self._sent) >= MAX_TEMPLATES:
                self._stop()
            is_new = self._process is None or self._process.poll() is not None
            if is_new:
                self._start()
            sent = request if key in self._sent else {**request, "source": source}
            try:
                write_frame(self._stream, sent)
                answer = read_frame(self._stream)
            except TimeoutError:
                self._stop()
                return {"problem": f"it did not finish within {self._deadline_s:g} s"}
            except (OSError, EOFError):
                status = self._stop(grace_s=1.0)  # it ends by itself
            else:
                self._sent.add(key)
                return answer
            # It was idle for long, or the thread that had started it ended.
            if is_new or status not in (0, -signal.SIGKILL):
                return {"problem": self._describe_end(status)}

    def _start(self) -> None:
        self._stop()
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(self._deadline_s)
        file = Path(__file__).with_name("template_child.py")
        with parent_end, child_end:
            self._process = subprocess.Popen(
                build_command(file, str(self._cpu_s), cpu_s=0, memory_bytes=MEMORY_BYTES),
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                env=build_variables(),
            )
            self._stream = cast(BinaryIO, parent_end.makefile("rwb"))  # keeps the socket open

    def _stop(self, grace_s: float = 0.0) -> int:
        """End the child after `grace_s`, and return its status."""
        process, self._process, self._sent = self._process, None, set()
        if process is None or self.owner != os.getpid():
            return 0
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        process.kill()
        with suppress(OSError):  # a request that was not sent
            self._stream.close()
        return process.wait()

    def _describe_end(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"it did not finish within {self._cpu_s} s of processor time"
        return f"it ended its process with status {status}"


_child: TemplateChild | None = None


def _get_child() -> TemplateChild:
    global _child
    if _child is None or _child.owner != os.getpid():  # in a forked process it is the parent's
        _child = TemplateChild()
    return _child


def _find_source(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    try:
        if file.exists():
            return read_text(file)
        for name in ("chat_template.json", "tokenizer_config.json"):
            file = path / name
            source = json.loads(read_text(file)).get("chat_template") if file.exists() else None
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            if isinstance(source, str):
                return source
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{file} has no readable chat template: {type(error).__name__}: {error}"
        raise FamilyError(problem, "copy it again from the checkpoint") from error
    return None
