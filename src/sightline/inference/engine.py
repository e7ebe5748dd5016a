"""What both engines are: requests, counters, refusals, and the shape that the server asks of them.

An engine knows nothing of HTTP. It takes requests, delivers each when it is done, and changes its
weights between two steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from sightline.errors import EngineError, SightlineError, WeightsGone
from sightline.inference.errors import build_engine_error, stopping_error
from sightline.inference.server_spec import ServerSpec
from sightline.inference.validator import ValidatedRequest
from sightline.pixels import Materializer
from sightline.wire.generate import WEIGHTS_UNAVAILABLE, SamplingParams, VersionSpan
from sightline.wire.weights import Manifest, read_manifest

JOIN_GAP_S = 0.02
MAX_INTERVALS = 20_000


@dataclass(slots=True)
class RequestTimeline:
    """The stages that a request has been through: each begins where the one before it ended."""

    since: float = field(default_factory=time.time)
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, begin and end of each stage, in seconds since 1970."""

    def end(self, name: str) -> None:
        now = time.time()
        self.stages.append((name, self.since, now))
        self.since = now


@dataclass(slots=True, eq=False)
class EngineRequest(ValidatedRequest):
    """One choice of a request. The caller fills the first part, and reads the rest when done."""

    seed: int | None
    """Seed of this choice; None lets the engine draw as it likes."""
    owner: Any = None
    """Whatever the caller needs to find its client again; the choices of a call have the same."""
    client: str = ""
    """Whom the call comes from; clients share the engine evenly."""

    digests: dict[str, str] = field(default_factory=dict)
    """Pixel digests of the request's images, by key."""
    cached_tokens: int = 0
    prompt_logprobs: np.ndarray | None = None
    """float32 (tokens,), where they are asked for; NaN where a token has none."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    """stop or length; abort for a request that was cancelled."""
    error: EngineError | None = None
    timeline: RequestTimeline = field(default_factory=RequestTimeline)

    @property
    def nbytes(self) -> int:
        """Memory of the request while it waits: its ids, and its images once decoded."""
        shown = {slot.item.key: slot.item for slot in self.slots}
        sizes = (i.ref.width * i.ref.height * i.patch_frames for i in shown.values())
        return self.prompt.nbytes + 3 * sum(sizes)


@dataclass
class EngineCounters:
    """What an engine has done since its start; written on the engine's own thread or loop alone."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_on_old_kv: int = 0
    """Tokens sampled over a KV cache of an older version; see keep_kv_over_updates."""
    adopted: int = 0
    prefilled_again: int = 0
    """Requests whose KV cache a weight update threw away."""


@dataclass
class BusyIntervals:
    """Wall-clock intervals in which the engine computed or took weights, or vLLM had requests to
    compute; short gaps are bridged. One thread adds, any may read."""

    seconds: float = 0.0
    _intervals: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))
    _lock: Lock = field(default_factory=Lock)

    def add(self, began: float) -> float:
        """The engine computed from `began` (seconds since 1970) until now; so many seconds."""
        now = time.time()
        self.seconds += now - began
        with self._lock:
            if self._intervals and began - self._intervals[-1][1] < JOIN_GAP_S:
                self._intervals[-1][1] = now
            else:
                self._intervals.append([began, now])
        return now - began

    def since(self, moment: float) -> list[list[float]]:
        """Intervals that end after `moment`."""
        with self._lock:
            return [list(pair) for pair in self._intervals if pair[1] > moment]


Deliver = Callable[[list[Any]], None]
"""Takes requests that are done, on whatever thread the engine has."""


class Engine(ABC):
    """Engines submit and deliver requests of a class of their own, which `build_requests` makes."""

    request_class: type[EngineRequest]

    def __init__(
        self, spec: ServerSpec, materializer: Materializer, counters: EngineCounters
    ) -> None:
        self.busy = BusyIntervals()
        self.counters = counters
        self.materializer = materializer
        self.on_fatal_error: Callable[[], None] = lambda: None
        """Called when the engine has failed beyond repair."""
        self._spec = spec
        self._is_stopping = False
        self._deliver: Deliver = lambda requests: None

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Manifest of the weights in use."""

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    @abstractmethod
    def num_running(self) -> int: ...

    @property
    def step_s(self) -> float:
        """Seconds that the step under way has taken; 0 where none is, or nobody knows."""
        return 0.0

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """Memory of the requests that wait."""

    @abstractmethod
    def start(self, deliver: Deliver) -> None:
        """Begins to compute; `deliver` gets requests when they are done."""

    @abstractmethod
    def stop(self) -> None:
        """Refuses what is unfinished, and ends."""

    def join(self, timeout_s: float) -> None:
        """Returns when the engine has ended, and has given back its threads."""
        self.materializer.close()

    @abstractmethod
    def submit(self, requests: list[Any]) -> None: ...

    @abstractmethod
    def cancel(self, request: Any) -> None: ...

    def build_requests(self, checked: ValidatedRequest) -> list[EngineRequest]:
        """The engine's own requests for a checked one, one for each choice."""
        params = self._prepare_params(checked.params)
        return [
            self.request_class(
                checked.prompt,
                checked.slots,
                checked.keys,
                params,
                None if params.seed is None else derive_choice_seed(params.seed, choice),
                request_id=checked.request_id,
            )
            for choice in range(params.n)
        ]

    def _prepare_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters as this engine needs them."""
        return params

    def _count_waiting_with(self, num_more: int) -> int:
        """Requests that would wait if `num_more` were submitted."""
        return self.num_waiting + num_more

    def _check_accepts(self, requests: Sequence[EngineRequest]) -> None:
        """Raises where the engine ends or is full; a request that would wait alone is taken."""
        if self._is_stopping:
            raise stopping_error()
        most, most_bytes = self._spec.max_waiting, self._spec.max_waiting_bytes
        more = sum(request.nbytes for request in requests)
        if self.num_waiting and self._count_waiting_with(len(requests)) > most:
            full = f"{self.num_waiting} requests wait, {most} may"
        elif self.num_waiting and self.waiting_bytes + more > most_bytes:
            full = f"requests of {self.waiting_bytes} bytes wait, {most_bytes} may"
        else:
            return
        raise build_engine_error("overloaded", full, "try again, or send fewer at once")

    def adopt(self, path: Path, check: Callable[[Manifest], None] = lambda m: None) -> Manifest:
        """Takes the weights of a manifest between two steps, and returns when it has.

        What is torn, does not fit or fails `check` is refused, and the weights stay. Not on the
        event loop.
        """
        try:
            manifest = read_manifest(path)
            check(manifest)
            if manifest != self.manifest:
                with self._open_update(path.parent, manifest) as update:
                    check(manifest)  # again: to read them takes time
                    if self._is_stopping:
                        raise stopping_error()
                    self._take_update(update)
        except EngineError:
            raise
        except WeightsGone as error:
            raise build_engine_error(WEIGHTS_UNAVAILABLE, error.problem, error.fix) from error
        except SightlineError as error:
            raise build_engine_error("weights", error.problem, error.fix) from error
        except OSError as error:
            fix = "let the server read the weights"
            raise build_engine_error("weights", str(error), fix) from error
        return manifest

    @abstractmethod
    def _open_update(self, folder: Path, manifest: Manifest) -> AbstractContextManager[Any]:
        """Reads and checks the weights of a manifest in `folder`, and holds them."""

    @abstractmethod
    def _take_update(self, update: Any) -> None:
        """Returns when the engine computes with the new weights."""

    def totals(self) -> dict[str, float]:
        """Counters since the start, by the names of metrics."""
        return {
            **asdict(self.counters),
            "busy_seconds": self.busy.seconds,
            **self.materializer.counts.totals(),
        }

    def now(self) -> dict[str, float]:
        """Gauges, by the names of metrics."""
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "waiting_bytes": self.waiting_bytes,
            "pixel_cache_bytes": self.materializer.counts.bytes_held,
            "version": self.manifest.version,
            "vision_version": self.manifest.vision_version,
        }

    def stats(self, since: float) -> dict[str, Any]:
        """What the server tells a run: counters, gauges, and when it was busy after `since`."""
        return {
            "time": time.time(),
            "version": self.manifest.label,
            "vision_version": self.manifest.vision_version,
            "totals": self.totals(),
            "now": self.now(),
            "busy": self.busy.since(since),
        }


def derive_choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: the first draws as the request's seed does alone, the others apart."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**64
