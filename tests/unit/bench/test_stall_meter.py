"""What the meter of stalls counts."""

from __future__ import annotations

import asyncio
import time

import pytest

from sightline.bench.harness.stall_meter import StallMeter, percentile


def test_a_stall_counts_for_every_tick_that_it_swallows() -> None:
    async def main() -> StallMeter:
        meter = StallMeter(tick_s=0.01)
        ticking = asyncio.ensure_future(meter.run())
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - what is measured
        while not meter.late_s:  # noqa: ASYNC110 - the meter tells nobody
            await asyncio.sleep(0)
        ticking.cancel()
        return meter

    meter = asyncio.run(main())
    stall = meter.late_s[0]
    assert stall >= 0.18
    assert len(meter.late_s) == pytest.approx(stall / 0.01, abs=1.5)
    assert meter.late_s == sorted(meter.late_s, reverse=True)
    assert len(meter.work_s) == 1 and meter.work_s[0] < stall, "asleep is not at work"


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 1001)]
    assert percentile(values, 0.999) == 999.0
    assert percentile(values, 0.5) == 500.0
    assert percentile([3.0], 0.999) == 3.0
