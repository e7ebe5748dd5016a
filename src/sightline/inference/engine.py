"""The engine interface of the inference server: requests, counters and weight updates.

An engine is independent of HTTP. It accepts requests, delivers each when it is done, and changes
its weights between two steps.
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
from sightline.inference.server_spec import MEBIBYTE, ServerSpec
from sightline.inference.validator import ValidatedRequest
from sightline.pixels import Materializer
from sightline.wire.generate import WEIGHTS_UNAVAILABLE, SamplingParams, VersionSpan
from sightline.wire.weights import Manifest, read_manifest

JOIN_GAP_S = 0.02
MAX_INTERVALS = 20_000


@dataclass(slots=True, eq=False)
class EngineRequest(ValidatedRequest):
    """One choice of a request. The caller sets the fields up to `client` and reads the rest."""

    seed: int | None
    """Seed of this choice; None lets the engine choose."""
    owner: Any = None
    """The HTTP call that this choice belongs to. All choices of a call have the same owner."""
    client: str = ""
    """Address of the client. Clients share the engine evenly."""

    digests: dict[str, str] = field(default_factory=dict)
    """Pixel digests of the request's images, by key."""
    cached_tokens: int = 0
    reward: float | None = None
    """The reward of the prompt, if requested."""
    prompt_logprobs: np.ndarray | None = None
    """float32 (tokens,) if requested; NaN for tokens without a logprob."""
    routes: np.ndarray | None = None
    """The experts of the tokens starting at `routes_from`, if requested; see `Choice.routes`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    """`stop`, `length`, or `abort` if the request was cancelled."""
    error: EngineError | None = None

    @property
    def nbytes(self) -> int:
        """Memory of a waiting request: its token ids and its decoded images."""
        items = {slot.item.key: slot.item for slot in self.slots}
        sizes = (i.ref.width * i.ref.height * i.patch_frames for i in items.values())
        return self.prompt.nbytes + 3 * sum(sizes)


@dataclass
class EngineCounters:
    """Counters since the start. Only the engine's own thread or loop writes them."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    adopted: int = 0
    prefilled_again: int = 0
    """Requests whose KV cache a weight update invalidated."""


@dataclass
class BusyIntervals:
    """Wall-clock intervals in which the engine was busy, with short gaps joined.

    One thread adds intervals. Any thread may read them.
    """

    seconds: float = 0.0
    _intervals: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))
    _lock: Lock = field(default_factory=Lock)

    def add(self, began: float) -> float:
        """Add the interval from `began` (seconds since 1970) to now, and return its seconds."""
        now = time.time()
        self.seconds += now - began
        with self._lock:
            if self._intervals and began - self._intervals[-1][1] < JOIN_GAP_S:
                self._intervals[-1][1] = now
            else:
                self._intervals.append([began, now])
        return now - began

    def since(self, moment: float) -> list[list[float]]:
        """Return the intervals that end after `moment`."""
        with self._lock:
            return [list(pair) for pair in self._intervals if pair[1] > moment]


Deliver = Callable[[list[Any]], None]
"""Receives finished requests, on the engine's thread."""


class Engine(ABC):
    """Base class of engines. `build_requests` creates instances of `request_class`."""

    request_class: type[EngineRequest]

    def __init__(
        self, spec: ServerSpec, materializer: Materializer, counters: EngineCounters
    ) -> None:
        self.busy = BusyIntervals()
        self.counters = counters
        self.materializer = materializer
        self.on_fatal_error: Callable[[], None] = lambda: None
        """Called when the engine has failed and cannot continue."""
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
        """Seconds that the current step has taken; 0 if there is none or it is unknown."""
        return 0.0

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """Memory of the waiting requests."""

    @abstractmethod
    def start(self, deliver: Deliver) -> None:
        """Start computing. `deliver` receives finished requests."""

    @abstractmethod
    def stop(self) -> None:
        """Refuse unfinished requests and stop."""

    def join(self, timeout_s: float) -> None:
        """Wait until the engine and its threads have ended."""
        self.materializer.close()

    @abstractmethod
    def submit(self, requests: list[Any]) -> None: ...

    @abstractmethod
    def cancel(self, request: Any) -> None: ...

    def build_requests(self, checked: ValidatedRequest) -> list[EngineRequest]:
        """Return one engine request for each choice of a validated request."""
        params = self._prepare_params(checked.params)
        first = params.seed
        # The first choice keeps the request's seed.
        steps = (choice * 0x9E3779B97F4A7C15 for choice in range(params.n))
        seeds = [None if first is None else (first + step) % 2**64 for step in steps]
        fields = checked.prompt, checked.slots, checked.keys, params
        return [self.request_class(*fields, seed, request_id=checked.request_id) for seed in seeds]

    def _prepare_params(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters as this engine needs them."""
        return params

    def _count_waiting_with(self, num_more: int) -> int:
        """Return how many requests would wait if `num_more` were submitted."""
        return self.num_waiting + num_more

    def _check_accepts(self, requests: Sequence[EngineRequest]) -> None:
        """Raise if the engine is stopping or full. An empty queue accepts any request."""
        if self._is_stopping:
            raise stopping_error()
        most, most_bytes = self._spec.max_waiting, int(self._spec.max_waiting_mb * MEBIBYTE)
        more = sum(request.nbytes for request in requests)
        if self.num_waiting and self._count_waiting_with(len(requests)) > most:
            problem = f"{self.num_waiting} requests are waiting, the limit is {most}"
        elif self.num_waiting and self.waiting_bytes + more > most_bytes:
            held = self.waiting_bytes
            problem = f"{held} bytes of requests are waiting, the limit is {most_bytes}"
        else:
            return
        raise build_engine_error("overloaded", problem, "retry later, or send fewer at once")

    def adopt(self, path: Path, check: Callable[[Manifest], None] = lambda m: None) -> Manifest:
        """Adopt the weights of a manifest between two steps, and return when done.

        Raise and keep the old weights if the files are incomplete, do not fit or fail `check`.
        Do not call this on the event loop.
        """
        try:
            manifest = read_manifest(path)
            check(manifest)
            if manifest != self.manifest:
                with self._open_update(path.parent, manifest) as update:
                    check(manifest)  # again, because reading takes time
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
            fix = "give the server read access to the weights"
            raise build_engine_error("weights", str(error), fix) from error
        return manifest

    @abstractmethod
    def _open_update(self, folder: Path, manifest: Manifest) -> AbstractContextManager[Any]:
        """Read and check the weights of a manifest in `folder`, and keep them open."""

    @abstractmethod
    def _take_update(self, update: Any) -> None:
        """Switch to the new weights, and return when the engine computes with them."""

    def totals(self) -> dict[str, float]:
        """Return counters since the start, by metric name."""
        return {
            **asdict(self.counters),
            "busy_seconds": self.busy.seconds,
            **self.materializer.counts.totals(),
        }

    def now(self) -> dict[str, float]:
        """Return gauges, by metric name."""
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "waiting_bytes": self.waiting_bytes,
            "pixel_cache_bytes": self.materializer.counts.bytes_held,
            "version": self.manifest.version,
            "vision_version": self.manifest.vision_version,
        }

    def stats(self, since: float) -> dict[str, Any]:
        """Return counters, gauges, and the busy intervals after `since`."""
        return {
            "time": time.time(),
            "version": self.manifest.label,
            "vision_version": self.manifest.vision_version,
            "totals": self.totals(),
            "now": self.now(),
            "busy": self.busy.since(since),
        }
