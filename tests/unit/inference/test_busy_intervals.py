from __future__ import annotations

import time

from sightline.inference.engine import JOIN_GAP_S, BusyIntervals


def test_short_gaps_are_bridged_and_long_ones_are_not() -> None:
    busy = BusyIntervals()
    now = time.time()
    busy.add(now - 0.001)
    busy.add(time.time())
    time.sleep(2 * JOIN_GAP_S)
    busy.add(time.time())
    first, second = busy.since(0.0)
    assert first[0] == now - 0.001 and second[0] - first[1] > JOIN_GAP_S
    assert busy.since(first[1]) == [second]
