from xml.etree import ElementTree

import pytest

from sightline.view.chart import Series, line_chart

from .event_fixtures import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series, **kwargs):
    return ElementTree.fromstring(line_chart("Title", series, **kwargs))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_a_chart_has_axes_lines_and_a_legend():
    points = [(k, k / 10) for k in range(11)]
    root = draw(Series("up", points), Series("same", [(0, 0.5), (10, 0.5)], colour=1))
    assert {"Title", "step", "up", "same", "0", "10", "0.2", "1"} <= set(texts(root))
    curves = [p for p in root.iter(f"{SVG}path") if "L" in p.get("d")]
    assert [curve.get("class") for curve in curves] == ["line k0", "line k1"]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, None), (2, float("nan")), (3, float("inf"))],
        [(1, 0.0)],
        [(5, 3e-8)],
        [(1, -1e9), (2, 1e9)],
        [(1, 7.0), (2, 7.0)],
        [(1, 1e-12), (2, 2e-12)],
    ],
)
def test_odd_data_still_makes_a_picture(points):
    for bounds in (None, (0.0, 1.0), (0.0, 0.0)):
        picture = line_chart("t", [Series("s", points)], y_range=bounds)
        ElementTree.fromstring(picture)
        assert "nan" not in picture.lower().replace("nanum", "")


def test_hostile_names_are_text():
    picture = line_chart(HOSTILE, [Series(HOSTILE, [(1, 1)]), Series("b", [(1, 2)])], HOSTILE)
    root = ElementTree.fromstring(picture)
    assert not list(root.iter(f"{SVG}script"))
    assert "<script" not in picture
