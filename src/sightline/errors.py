"""Every error that Sightline raises on purpose.

    SightlineError                a problem, with its values, and a fix to try
    ├── ConfigError               a setting that cannot work; refused at load
    ├── MediaError                an image, its ref or its store cannot be used as asked
    │   ├── MediaRefused          ingest will not take these bytes or this source
    │   ├── MediaMissing          no store root holds the digest
    │   ├── MediaCorrupt          the stored bytes do not hash to their digest
    │   ├── MediaUndecodable      the bytes are what the ref names, yet no decoder reads them
    │   └── StoreFull             the store reached [media] max_gb
    ├── MessageError              a message or part of the wrong shape; names its JSON path
    │   └── PromptTooLong         a prompt that cannot fit, whatever its tokens
    ├── FamilyError               a checkpoint that no family knows, or a family cannot serve
    ├── FingerprintMismatch       two processes hold different processor settings
    ├── PixelMismatch             sampler and trainer made different pixels
    ├── PolicyMismatch            samples or weights that are not of this run's policy
    ├── PixelsUnproven            a sampler that cannot say which pixels it saw
    ├── Misaligned                data that must line up does not (tokens, slots, arrays, versions)
    ├── WeightsError              published weights that are torn, or are not those of the model
    │   └── WeightsGone           weights that the trainer's memory no longer holds
    ├── WireError                 a message of another schema, or with unknown fields
    ├── EngineError               an inference server refused or failed a request
    ├── EnvironmentFailed         user code of an environment failed
    ├── JudgeFailed               a judge model gave no verdict
    ├── RolloutTruncated          a rollout was cut short: there is no room left
    │   └── TurnLimitReached      a rollout was cut short: there are no turns left
    ├── NoTrainableSamples        batch after batch without a trainable sample
    ├── TrainingDiverged          the loss or its gradient is no longer finite
    ├── ResumeRefused             a run that cannot go on exactly
    ├── DiskFull                  the disk cannot hold what the run will write
    └── ProcessFailed             a process of the run died; names it and its last words
        └── PeerLost              a process at the other end of a channel is silent, or wrong

An error is raised where the cause is known and carries what the user should do next.
`except Exception` belongs to few places: around an environment's own code, in a sink of
`view`, at the edge of a server, around a rank's step and in the CLI's main.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO, cast
from urllib.parse import quote

MAX_PROBLEM_CHARS = 2000
"""Characters of a problem that an answer carries."""
MASK = "***"
MIN_MASKED_CHARS = 8
"""A shorter secret stands in ordinary words, too; it is not masked."""
_PATH = re.compile(r"(\w+(?:\[(?:\d+|\.\.\.)\]|\.\w+)*): ")


_masked: tuple[str, ...] = ()
"""Secrets that this process has read, as a text may spell them; the longest first."""


def mask_from_now_on(secret: str) -> None:
    """Keeps a secret, as it is, in quotes and in a url, out of what this process writes."""
    global _masked
    if len(secret) >= MIN_MASKED_CHARS and secret not in _masked:
        in_url = quote(secret, safe="", errors="surrogateescape")
        spelled = {*_masked, secret, repr(secret)[1:-1], in_url}
        _masked = tuple(sorted(spelled, key=len, reverse=True))


def mask(text: str) -> str:
    """The text without the secrets that this process has read."""
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
    """Masks what Python prints in this process, tracebacks among it."""
    sys.stdout = cast(TextIO, _MaskedStream(sys.stdout))
    sys.stderr = cast(TextIO, _MaskedStream(sys.stderr))


def clean_text(text: str) -> str:
    """The text of a failure as it may leave the process: secrets are masked, and one half of a
    surrogate pair, which cannot be encoded, is written as an escape."""
    return mask(text).encode("utf-8", "backslashreplace").decode()


class SightlineError(Exception):
    """A `problem` with its values and a `fix` to try; both survive pickling."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(clean_text(problem), clean_text(fix))

    @property
    def problem(self) -> str:
        return str(self.args[0])

    @property
    def short_problem(self) -> str:
        """The problem as an answer tells it: it may quote a request, and not all of a long one."""
        text = self.problem
        return text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."

    @property
    def fix(self) -> str:
        return str(self.args[1])

    @property
    def path(self) -> str:
        """The JSON path that the problem begins with, such as `messages[3].role`; or empty."""
        found = _PATH.match(self.problem[:MAX_PROBLEM_CHARS])
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}"


class ConfigError(SightlineError):
    """A configuration that cannot work."""


class MediaError(SightlineError, ValueError):
    """An image cannot be used: its ref, its bytes or the store that holds them is not right."""


class MediaRefused(MediaError):
    """Ingest does not take these bytes, or this source of bytes."""


class MediaMissing(MediaError):
    """No configured store root holds bytes under this digest."""


class MediaCorrupt(MediaError):
    """The store holds bytes under this digest that do not hash to it."""


class MediaUndecodable(MediaError):
    """The stored bytes are the ones the ref names, but no decoder can read them."""


class StoreFull(MediaError):
    """The store has reached its limit, or the disk under it is nearly full."""


class MessageError(SightlineError, ValueError):
    """A message of the wrong shape, or one that a chat format cannot express."""

    @classmethod
    def at(cls, path: str, problem: str, fix: str) -> MessageError:
        """An error about the part at `path`, such as `messages[3].content[1].image_url`."""
        return cls(f"{path}: {problem}", fix)


class PromptTooLong(MessageError):
    """Text, messages or tools that max_model_len tokens cannot hold; nothing was tokenized."""


class FamilyError(SightlineError):
    """A checkpoint that no family knows, or that its family cannot work with."""


class FingerprintMismatch(SightlineError, ValueError):
    """Two sides would make different pixels or token counts from one image."""


class PixelMismatch(SightlineError, ValueError):
    """The trainer's pixels are not the ones the sampler used."""


class PolicyMismatch(SightlineError):
    """Samples of weights that the run did not publish, or that its trainer does not agree with."""


class PixelsUnproven(SightlineError):
    """The sampler gave no digest of the pixels that it used."""


class Misaligned(SightlineError, ValueError):
    """Data that must line up does not. Never repaired: the sample is dropped and counted."""


class WeightsError(SightlineError, ValueError):
    """Published weights are torn, or do not fit the model. An engine keeps those that it has."""


class WeightsGone(WeightsError):
    """Weights that stood in a trainer's memory and stand there no more; newer ones will."""


class WireError(SightlineError, ValueError):
    """A message that cannot be read: of another schema, with unknown fields, or damaged."""


CERTIFICATE_FIX = (
    "name a file with the certificate of its authority in the variable SSL_CERT_FILE, and use an "
    "address that the server's certificate names"
)
"""What to do where a server is not trusted."""


class EngineError(SightlineError):
    """An inference server refused or failed a request."""

    retry_after_s = 0.0
    """Seconds after which the server asks to be tried again; 0 where it does not say."""

    def __init__(self, problem: str, fix: str, kind: str = "engine", status: int = 500) -> None:
        super().__init__(problem, fix)
        self.args = (self.problem, self.fix, kind, status)

    @property
    def kind(self) -> str:
        """The stable `type` of the error on the generate protocol."""
        return str(self.args[2])

    @property
    def status(self) -> int:
        return int(self.args[3])


class EnvironmentFailed(SightlineError):
    """An environment's own code raised, or returned something that is no reward."""


class JudgeFailed(SightlineError):
    """The endpoint of a judge model did not answer, or its answer holds no verdict."""


class RolloutTruncated(SightlineError):
    """The next prompt does not fit into the model's context, which ends the rollout."""


class TurnLimitReached(RolloutTruncated):
    """The rollout has made as many model calls as it may."""


class NoTrainableSamples(SightlineError):
    """Batch after batch had no sample to learn from."""


class TrainingDiverged(SightlineError):
    """The loss of a step, or the norm of its gradient, is not a finite number."""


class ResumeRefused(SightlineError):
    """A run that cannot go on exactly as it began."""


class DiskFull(SightlineError):
    """The disk cannot hold what the run is going to write."""


class ProcessFailed(SightlineError):
    """A process of the run ended before its time."""


class PeerLost(ProcessFailed):
    """A process at the other end of a channel, `peer`, is no longer heard there."""

    def __init__(self, problem: str, fix: str, peer: str) -> None:
        super().__init__(problem, fix)
        self.args = (self.problem, self.fix, peer)

    @property
    def peer(self) -> str:
        return str(self.args[2])


SMALLER_IMAGES = (
    "let images have fewer tokens ([model] max_pixels; of a model of the generic family what its "
    "preprocessor_config.json knows)"
)
"""What to do where prompts are too long."""


def find_fix(text: str) -> str:
    """What an error says to do, where a traceback ends with one, before another way to mend it."""
    lines = text.strip().splitlines()
    last = lines[-1] if lines else ""
    return f"{last.removeprefix('  fix: ')}; or " if last.startswith("  fix: ") else ""


def summarize_traceback(text: str) -> str:
    """Its last line, which says what was wrong, and not what to do about it."""
    lines = text.strip().splitlines() or [""]
    said = [line for line in lines if not line.startswith("  fix: ")]
    return (said or lines)[-1]
