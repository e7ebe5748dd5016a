import pytest

from sightline.view.timeline import build_timeline, total_s

from .event_fixtures import busy, train


def test_overlap_is_the_time_both_are_busy():
    events = [event for k in range(1, 31) for event in (busy(k), train(k))]
    timeline = build_timeline(events)
    # The trainer works in the last 0.9 s of each step, the server pauses for 0.15 s of them.
    assert total_s(timeline.trainer) == pytest.approx(27.0)
    assert total_s(timeline.both) == pytest.approx(22.5)
