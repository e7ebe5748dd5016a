"""What the inference servers tell of themselves, every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from sightline.rollout.client import GenerateClient
from sightline.run import EventLog

POLL_EVERY_S = 2.0
STATS_TIMEOUT_S = 10.0


@dataclass
class ServerHealthWatch:
    """Tells a server that is gone, or stopped, from one that takes long over its answers: its event
    loop answers /health, whatever the engine computes."""

    clients: Sequence[GenerateClient]
    events: EventLog
    ask_every_s: float = 1.0
    timeout_s: float = 2.0
    """How long one answer may take."""
    silent_after_s: float = 5.0
    """How long there may be none before the server is named; two requests at least."""

    async def keep_watching(self) -> None:
        await asyncio.gather(*map(self._watch, self.clients))

    async def _watch(self, client: GenerateClient) -> None:
        await client.wait_reachable("/health")
        num_missed, since, is_named = 0, 0.0, False
        while True:
            await asyncio.sleep(self.ask_every_s)
            if not num_missed:
                since = time.monotonic()
            is_there = await self._is_answered(client)
            num_missed = 0 if is_there else num_missed + 1
            silent_s = time.monotonic() - since
            if num_missed > 1 and silent_s >= self.silent_after_s and not is_named:
                is_named = True
                self._tell(
                    f"{client.base_url} has not answered for {silent_s:.0f} s: the server is "
                    "stopped or gone, or its machine cannot be reached; rollouts wait for it"
                )
            elif is_there and is_named:
                is_named = False
                self._tell(f"{client.base_url} answers again, after {silent_s:.0f} s")

    async def _is_answered(self, client: GenerateClient) -> bool:
        try:
            await asyncio.wait_for(client.get("/health"), self.timeout_s)
        except (OSError, aiohttp.ClientError):
            return False
        return True

    def _tell(self, words: str) -> None:
        self.events.write("process", words=words)


@dataclass
class ServerStatsPoller:
    """Notes when a server was busy, for the timeline, and the state of their caches."""

    clients: Sequence[GenerateClient]
    events: EventLog
    caches: dict[str, dict[str, float]]
    """Filled with what the servers tell of their caches, summed."""
    heartbeat_file: Path | None = None
    """Touched whenever the servers have answered."""
    since: float = field(default_factory=time.time)

    async def keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll()

    async def poll(self) -> None:
        """Asks the servers once. One that does not answer is for others to name."""
        with contextlib.suppress(OSError, ValueError, aiohttp.ClientError):
            now = time.time()
            path = f"/sightline/v1/stats?since={self.since}"
            async with asyncio.timeout(STATS_TIMEOUT_S):
                answers = await asyncio.gather(*(client.get(path) for client in self.clients))
            stats = [json.loads(answer) for answer in answers]
            if self.heartbeat_file is not None:
                self.heartbeat_file.touch()
            self.since = now
            self.caches.update(
                summarize_caches(
                    _sum_counts([one.get("totals", {}) for one in stats]),
                    _sum_counts([one.get("now", {}) for one in stats]),
                )
            )
            if busy := [span for one in stats for span in one.get("busy", ())]:
                self.events.write("busy", intervals=sorted(busy))


def _sum_counts(counted: list[dict[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for counts in counted:
        total.update({name: value for name, value in counts.items() if value is not None})
    return dict(total)


def summarize_caches(
    totals: dict[str, float], now: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Hits, misses, evictions and bytes of each cache that the server has, since its start."""
    names = {
        "server_pixels": (
            ("pixel_cache_hits", "pixel_cache_joined"), "images_made", "pixel_cache_evicted",
            "pixel_cache_bytes",
        ),
        "server_features": (
            ("feature_cache_hits",), "images_encoded", "feature_cache_evicted",
            "feature_cache_bytes",
        ),
        "server_prefix_tokens": (
            ("cached_tokens",), "computed_tokens", "rows_evicted", "kv_bytes",
        ),
    }  # fmt: skip
    return {
        cache: {
            "hits": sum(totals.get(name, 0) for name in hits),
            "misses": totals[misses],
            "evictions": totals.get(evictions, 0),
            "bytes": now.get(size, 0),
        }
        for cache, (hits, misses, evictions, size) in names.items()
        if misses in totals
    }
