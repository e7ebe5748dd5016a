import pytest

from sightline.view.timeline import build_timeline
from sightline.wire.event import Event

from .event_fixtures import busy, train


def test_overlap_is_the_time_in_which_both_are_busy():
    events = [event for k in range(1, 31) for event in (busy(k), train(k))]
    timeline = build_timeline(events)
    # The trainer works in the last 0.9 s of each step, the server pauses for 0.15 s of them.
    assert timeline.trainer_s == pytest.approx(27.0)
    assert timeline.both_s == pytest.approx(22.5)
    assert timeline.share == pytest.approx(22.5 / 27)


def test_intervals_of_a_wrong_shape_are_left_out():
    wrong = [[1], "ab", [2, 1], [None, 3], {"a": 1}]
    events = [
        Event(time=0, process="server", kind="busy", values={"intervals": [*wrong, [0, 1]]}),
        Event(time=0, process="orchestrator", kind="busy", values={"intervals": None}),
        *(train(k, busy=value) for k, value in enumerate(wrong)),
    ]
    timeline = build_timeline(events)
    assert timeline.server == [(0, 1)]
    assert timeline.trainer == []
    assert timeline.share is None
