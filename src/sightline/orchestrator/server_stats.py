"""Polls the statistics of the inference servers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sightline.rollout.client import GenerateClient
from sightline.run import EventLog

POLL_EVERY_S = 2.0
WRITTEN_TOTALS = (
    "busy_seconds", "busy_prefill_seconds", "busy_decode_seconds", "busy_vision_seconds",
    "busy_adopt_seconds", "steps", "computed_tokens", "cached_tokens", "sampled_tokens",
    "images_encoded", "decode_steps", "decode_tokens", "decode_keys", "decode_seconds",
)  # fmt: skip
"""Counters of where the time went. An engine may lack some."""
STATS_TIMEOUT_S = 10.0


@dataclass
class ServerStatsPoller:
    """Records when servers were busy, for the timeline."""

    list_clients: Callable[[], Sequence[GenerateClient]]
    """Returns the clients of the available servers."""
    events: EventLog
    since: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._ahead_s: dict[str, float] = {}
        """Seconds by which each server's clock is ahead of this process's."""

    async def keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            await self.poll()

    async def poll(self) -> None:
        """Poll each server once. Servers that do not answer are skipped."""
        now = time.time()
        answers = await asyncio.gather(*map(self._find_stats, self.list_clients()))
        stats = [answer for answer in answers if answer is not None]
        if not stats:
            return
        self.since = now
        if busy := [span for server in stats for span in server.get("busy", ())]:
            totals: Counter[str] = Counter()
            for server in stats:
                counts = server.get("totals", {})
                totals.update({name: counts[name] for name in WRITTEN_TOTALS if counts.get(name)})
            self.events.write("busy", intervals=sorted(busy), totals=dict(totals))

    async def _find_stats(self, client: GenerateClient) -> dict[str, Any] | None:
        """Return a server's statistics since the last poll, with times by this process's clock."""
        url = client.base_url
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                if url not in self._ahead_s:
                    await self._ask(client, math.inf)
                ahead_s = self._ahead_s[url]
                stats = await self._ask(client, self.since + ahead_s)
        except (OSError, ValueError, aiohttp.ClientError):
            return None
        if isinstance(stats, dict):
            busy = stats.get("busy", ())
            return {**stats, "busy": [[time_s - ahead_s for time_s in span] for span in busy]}
        return None

    async def _ask(self, client: GenerateClient, since: float) -> Any:
        stats = json.loads(await client.get(f"/sightline/v1/stats?since={since}"))
        now = time.time()
        its_time = stats.get("time", now) if isinstance(stats, dict) else now
        self._ahead_s[client.base_url] = its_time - now
        return stats
