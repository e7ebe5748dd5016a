"""Every error that Sightline raises on purpose.

An error is raised where the cause is known, and contains a fix. `except Exception` is limited to a
few places: an environment's own code, a sink of `view`, a server's request handler, a rank's step,
and the CLI's main.
"""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any, TextIO, cast
from urllib.parse import quote

MAX_PROBLEM_CHARS = 2000
"""Maximum length of a problem in a server's answer."""
MASK = "***"
MIN_MASKED_CHARS = 8
"""Shorter secrets are not masked, because they may occur in ordinary words."""
_PATH = re.compile(r"(\w+(?:\[(?:\d+|\.\.\.)\]|\.\w+)*): ")


_masked: tuple[str, ...] = ()
"""Secrets that this process has read, in every spelling, longest first."""


def mask_from_now_on(secret: str) -> None:
    """Mask a secret in all output of this process, including its quoted and URL forms."""
    global _masked
    if len(secret) >= MIN_MASKED_CHARS and secret not in _masked:
        in_url = quote(secret, safe="", errors="surrogateescape")
        spellings = {*_masked, secret, repr(secret)[1:-1], in_url}
        _masked = tuple(sorted(spellings, key=len, reverse=True))


def mask(text: str) -> str:
    """Mask all secrets that this process has read."""
    for secret in _masked:
        text = text.replace(secret, MASK)
    return text


class _MaskedStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mask_output() -> None:
    """Mask secrets in all text that Python prints in this process, including tracebacks."""
    sys.stdout = cast(TextIO, _MaskedStream(sys.stdout))
    sys.stderr = cast(TextIO, _MaskedStream(sys.stderr))


def clean_text(text: str) -> str:
    """Mask secrets and escape unpaired surrogates, so that the text can be encoded."""
    return mask(text).encode("utf-8", "backslashreplace").decode()


def format_command(*words: object) -> str:
    """Return a command to paste into a shell, with its words quoted."""
    return shlex.join(map(str, words))


class SightlineError(Exception):
    """A `problem` with its values and a `fix` to try. Both survive pickling."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(clean_text(problem), clean_text(fix))

    @property
    def problem(self) -> str:
        return str(self.args[0])

    @property
    def short_problem(self) -> str:
        """The problem, shortened for a server's answer, since it may quote a long request."""
        text = self.problem
        return text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."

    @property
    def fix(self) -> str:
        return str(self.args[1])

    @property
    def path(self) -> str:
        """The JSON path at the start of the problem, such as `messages[3].role`. Empty for none."""
        match = _PATH.match(self.problem[:MAX_PROBLEM_CHARS])
        return match[1] if match else ""

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}"


class ConfigError(SightlineError):
    """An invalid configuration."""


class NotRegularFile(SightlineError, OSError):
    """A pipe, device or link is where a regular file is expected."""

    strerror = "not a regular file"

    @classmethod
    def at(cls, path: object) -> NotRegularFile:
        return cls(f"{path} is {cls.strerror}", "put a regular file in its place")


class FolderNotFile(SightlineError, IsADirectoryError):
    """A folder is where a file is expected."""

    strerror = "Is a directory"

    @classmethod
    def at(cls, path: object) -> FolderNotFile:
        return cls(f"{path} is a folder, not a file", "put a file in its place")


class MediaError(SightlineError, ValueError):
    """An image, its ref or the store that holds it cannot be used."""


class MediaRefused(MediaError):
    """Ingest refuses these bytes or their source."""


class MediaMissing(MediaError):
    """No configured store root holds bytes under this digest."""


class MediaCorrupt(MediaError):
    """The store holds bytes under this digest that do not hash to it."""


class MediaUndecodable(MediaError):
    """The stored bytes match the ref, but no decoder can read them."""


class StoreFull(MediaError):
    """The store has reached its limit, or its disk is nearly full."""


class MessageError(SightlineError, ValueError):
    """A malformed message, or one that the chat format cannot express."""

    @classmethod
    def at(cls, path: str, problem: str, fix: str) -> MessageError:
        """Return an error about the part at `path`, such as `messages[3].content[1].image_url`."""
        return cls(f"{path}: {problem}", fix)


class PromptTooLong(MessageError):
    """Text, messages or tools that exceed max_model_len. Detected before tokenization."""


class FamilyError(SightlineError):
    """A checkpoint that no model family supports."""


class FingerprintMismatch(SightlineError, ValueError):
    """Two processes would compute different pixels or token counts for the same image."""


class PixelMismatch(SightlineError, ValueError):
    """The trainer's pixels differ from the sampler's."""


class PolicyMismatch(SightlineError):
    """Samples from weights that the run did not publish, or that do not match the trainer's."""


class PixelsUnproven(SightlineError):
    """The sampler sent no digest of the pixels that it used."""


class Misaligned(SightlineError, ValueError):
    """Data that must line up does not. It is never repaired. The sample is dropped and counted."""


class WeightsError(SightlineError, ValueError):
    """Published weights are damaged or do not fit the model. An engine keeps its old weights."""


class WeightsGone(WeightsError):
    """Weights that are no longer in the trainer's memory. Newer ones will follow."""


class WireError(SightlineError, ValueError):
    """A message that cannot be read: it has a different schema or unknown fields, or is damaged."""


CERTIFICATE_FIX = (
    "set the environment variable SSL_CERT_FILE to the file of its certificate authority, and use "
    "an address that the server's certificate names"
)
"""The fix for an untrusted server certificate."""


class EngineError(SightlineError):
    """An inference server refused or failed a request."""

    retry_after_s = 0.0
    """Seconds to wait before a retry, as the server requests; 0 if it does not specify any."""

    def __init__(self, problem: str, fix: str, kind: str = "engine", status: int = 500) -> None:
        super().__init__(problem, fix)
        self.args = (self.problem, self.fix, kind, status)

    @property
    def kind(self) -> str:
        """The error's stable `type` in the generate protocol."""
        return str(self.args[2])

    @property
    def status(self) -> int:
        return int(self.args[3])


class EnvironmentFailed(SightlineError):
    """An environment's own code raised an error, or returned something other than a reward."""


class JudgeFailed(SightlineError):
    """The endpoint of a judge model did not answer, or its answer has no score."""


class RolloutTruncated(SightlineError):
    """The next prompt does not fit into the model's context."""


class TurnLimitReached(RolloutTruncated):
    """The rollout has made the maximum number of model calls."""


class NoTrainableSamples(SightlineError):
    """Several batches in a row had no trainable sample."""


class TrainingDiverged(SightlineError):
    """The loss of a step, or the norm of its gradient, is not finite."""


class ResumeRefused(SightlineError):
    """A run cannot be resumed exactly."""


class DiskFull(SightlineError):
    """The disk has no room for the run's files."""


class ProcessFailed(SightlineError):
    """A process of the run ended unexpectedly."""


class PeerLost(ProcessFailed):
    """The process at the other end of a channel, `peer`, is silent or misbehaves."""

    def __init__(self, problem: str, fix: str, peer: str) -> None:
        super().__init__(problem, fix)
        self.args = (self.problem, self.fix, peer)

    @property
    def peer(self) -> str:
        return str(self.args[2])


SMALLER_IMAGES = (
    "reduce the tokens per image: lower [model] max_pixels, or for the generic family the limits "
    "in preprocessor_config.json"
)
"""The fix for prompts that are too long."""


def find_fix(text: str) -> str:
    """Return the fix at the end of a traceback, followed by `; or `, or an empty string."""
    lines = text.strip().splitlines()
    last = lines[-1] if lines else ""
    return f"{last.removeprefix('  fix: ')}; or " if last.startswith("  fix: ") else ""


def summarize_traceback(text: str) -> str:
    """Return the last line of a traceback that is not a fix."""
    lines = text.strip().splitlines() or [""]
    problems = [line for line in lines if not line.startswith("  fix: ")]
    return (problems or lines)[-1]
