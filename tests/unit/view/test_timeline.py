from xml.etree import ElementTree

import pytest

from sightline.view.timeline import (
    WINDOW_S,
    build_timeline,
    draw_timeline,
    find_window,
    intersect_intervals,
    merge_intervals,
)
from sightline.wire.event import Event

from .event_fixtures import busy, train


def test_overlap_is_the_time_in_which_both_are_busy():
    events = [event for k in range(1, 31) for event in (busy(k), train(k))]
    timeline = build_timeline(events)
    # The trainer works in the last 0.9 s of each step, the server pauses for 0.15 s of them.
    assert timeline.trainer_s == pytest.approx(27.0)
    assert timeline.both_s == pytest.approx(22.5)
    assert timeline.share == pytest.approx(22.5 / 27)
    start, end = find_window(timeline)
    assert end - start == pytest.approx(WINDOW_S)


def test_merging_and_intersecting():
    assert merge_intervals([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert merge_intervals([(0, 1), (1.1, 2)], gap=0.2) == [(0, 2)]
    assert intersect_intervals([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert intersect_intervals([(0, 1)], [(1, 2)]) == []


def test_long_steps_get_a_window_that_shows_several():
    events = [train(k, busy=[100.0 * k, 100.0 * k + 60]) for k in range(1, 20)]
    start, end = find_window(build_timeline(events))
    assert end - start == pytest.approx(400)


def test_the_strip_is_a_picture_and_empty_without_training():
    events = [event for k in range(1, 31) for event in (busy(k), train(k))]
    root = ElementTree.fromstring(draw_timeline(build_timeline(events)))
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"server", "trainer", "both", "10s", "15"} <= words
    assert draw_timeline(build_timeline([busy(1)])) == ""


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
