"""Rewards for boxes, points, tables, code and JSON, with their edge cases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sightline.envs.rewards.boxes import iou, points
from sightline.envs.rewards.structures import code, json_overlap, json_schema, table
from sightline.media import MediaRef

BOX = [0, 0, 10, 10]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("[0, 0, 10, 10]", 1),
        ("(0,0),(10,10)", 1),
        ("<|box_start|>(0,0),(10,10)<|box_end|>", 1),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat 2"}]\n```', 1),
        ("x1=0, y1=0, x2=10, y2=10", 1),
        ('{"xmin": 0, "ymin": 0, "xmax": 10, "ymax": 10}', 1),
        ("In 2024 it is at [0.0, 0.0, 10.0, 1e1].", 1),
        ("[0, 0, 5, 10]", 0.5),
        ("[5, 0, 15, 10]", 1 / 3),
        ("[20, 20, 30, 30]", 0),
        ("[10, 10, 0, 0]", 0),  # inverted
        ("[0, 0, 0, 0]", 0),
        ("[0, 0, 10]", 0),
        ("[0, 0, 10, 10, 10]", 0),
        ("[0, 0, 1e999, 10]", 0),
        ("[-1e308, -1e308, 1e308, 1e308]", 0),
        ("no box", 0),
        ("", 0),
        ("[0, 0, 10, 10] [0, 0, 10, 10]", 0.5),  # a second box costs
    ],
)
def test_iou_of_one_box(answer: str, reward: float) -> None:
    assert iou(answer, BOX) == pytest.approx(reward)


def test_iou_pairs_several_boxes_in_any_order() -> None:
    two = [BOX, [20, 20, 30, 30]]
    assert iou("[20,20,30,30], [0,0,10,10]", two) == 1
    assert iou("[0,0,10,10]", two) == 0.5
    # The best pair is taken first, not the first one.
    assert iou("[0,0,5,10] [0,0,10,10]", two) == 0.5


def test_iou_threshold_and_layout() -> None:
    assert iou("[0,0,5,10]", BOX, threshold=0.5) == 1 and iou("[0,0,4,10]", BOX, threshold=0.5) == 0
    assert iou("[20,20,10,10]", [20, 20, 10, 10], layout="xywh") == 1
    with pytest.raises(ValueError, match="layout = 'yxyx'"):
        iou("[0,0,5,10]", BOX, layout="yxyx")


def test_answer_range_scales_to_the_image() -> None:
    row = {"image": [MediaRef("0" * 64, "image/png", 200, 100, 1)]}
    assert iou("[500, 500, 1000, 1000]", [100, 50, 200, 100], row, answer_range=1000) == 1
    assert points("(500, 500)", [99, 49, 101, 51], row, answer_range=1000) == 1
    with pytest.raises(ValueError, match="needs an image in the column 'photo'"):
        iou("[0, 0, 1, 1]", BOX, row, answer_range=1000, image="photo")


@pytest.mark.parametrize(
    "expected", [None, [], "here", [1, 2, 3], [[1, 2], [3, 4]], [0, 0, 0, 9], ["a"] * 4, 5]
)
def test_invalid_box_reference_raises(expected: Any) -> None:
    for reward in (iou, points):
        with pytest.raises(ValueError, match="the reference"):
            reward("[0, 0, 1, 1]", expected)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("(5, 5)", BOX, 1),
        ("[10, 10]", BOX, 1),  # the edge is inside
        ('{"point_2d": [5, 5]}', BOX, 1),
        ('<point x="5" y="5">cat</point>', BOX, 1),
        ("(11, 5)", BOX, 0),
        ("5", BOX, 0),
        ("", BOX, 0),
        ("(5, 5) (6, 6)", BOX, 0.5),  # a second point costs
        ("(5, 5) (25, 25)", [BOX, [20, 20, 30, 30]], 1),
        ("(5, 5) (6, 6)", [BOX, [20, 20, 30, 30]], 0.5),  # one box, one point
        ("(5, 5) (15, 5)", [[0, 0, 20, 10], BOX], 1),  # a box around the other
    ],
)
def test_points_each_need_a_box(answer: str, expected: Any, reward: float) -> None:
    assert points(answer, expected) == reward


TABLE = [["name", "age"], ["Ann", "7"]]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("| name | age |\n|---|:-:|\n| Ann | 7 |", 1),
        ("Here:\n```\nName,Age\nAnn, 7\n```", 1),
        ("<table><tr><th>name<th>age</tr><tr><td><b>Ann</b></td><td>7</td></tr></table>", 1),
        ("| name | age |\n| Bob | 7 |", 0.75),
        ("| name | age |", 2 / 3),
        ("| age | name |\n| 7 | Ann |", 0),
        ("", 0),
        ("no table", 0),
    ],
)
def test_table_is_the_f1_score_of_its_cells(answer: str, reward: float) -> None:
    assert table(answer, TABLE) == pytest.approx(reward)
    assert table(answer, "name,age\nAnn,7") == pytest.approx(reward)


def test_table_reference_may_have_numbers() -> None:
    assert table("name,age\nAnn,7", [["name", "age"], ["Ann", 7]]) == 1


@pytest.mark.parametrize("expected", ["", [], None, {"name": "Ann"}, ["Ann"]])
def test_empty_table_reference_raises(expected: Any) -> None:
    with pytest.raises(ValueError, match="the reference is not a table"):
        table("a,b", expected)


@pytest.mark.parametrize(
    ("answer", "language", "expected", "reward"),
    [
        ("x = 1", "python", "x=1  # one", 1),
        ("Here:\n```python\nx = 1\n```\nDone.", "python", "x = 1", 1),
        ("x = 2", "python", "x = 1", 0),
        ("x = (", "python", "x = 1", 0),
        ("-" * 100_000 + "1", "python", "x = 1", 0),
        ("(" * 5000, "python", "x = 1", 0),
        ("\0", "python", "x = 1", 0),
        ("", "python", "x = 1", 0),
        ("select  a\nfrom b", "sql", "select a from b", 1),
        ("selecta from b", "sql", "select a from b", 0),
    ],
)
def test_code_is_compared_without_its_layout(
    answer: str, language: str, expected: str, reward: float
) -> None:
    assert code(answer, expected, language) == reward


def test_code_reference_that_does_not_parse_raises() -> None:
    with pytest.raises(ValueError, match="is not python"):
        code("x", "x = (")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"total": 3, "items": ["a", "b"]}', 1),
        ('Sure: ```json\n{"items": ["A", "b"], "total": 3.0}\n```', 1),
        ('The JSON is {"total": 3, "items": ["a", "b"]}.', 1),
        ('{"total": 3, "items": ["a"]}', 0.8),
        ('{"total": "3", "items": ["a", "b"]}', 2 / 3),  # a text is no number
        ('{"total": true}', 0),
        ('{"total": NaN}', 0),
        ("{", 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_json_overlap_is_the_f1_score_of_values_at_their_paths(answer: str, reward: float) -> None:
    expected = {"total": 3, "items": ["a", "b"]}
    assert json_overlap(answer, expected) == pytest.approx(reward)
    assert json_overlap(answer, json.dumps(expected)) == pytest.approx(reward)


def test_json_reference_that_does_not_parse_raises() -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        json_overlap("{}", "{")


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"n": 3}', 1),
        ('{"n": "3"}', 0),
        ('{"n": 3, "m": 4}', 0),
        ("{}", 0),
        ("3", 0),
        ("no", 0),
    ],
)
def test_json_schema_is_checked(answer: str, reward: float) -> None:
    assert json_schema(answer, SCHEMA) == json_schema(answer, json.dumps(SCHEMA)) == reward
    assert json_schema(answer, None, schema=SCHEMA) == reward


def test_invalid_schema_raises_and_nothing_is_fetched() -> None:
    with pytest.raises(ValueError, match="the schema is not valid"):
        json_schema("{}", {"type": "thing"})
    with pytest.raises(ValueError, match="(?i)unresolvable"):
        json_schema("{}", {"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(ValueError, match="None is not a JSON schema"):
        json_schema("{}", None)


def test_deep_answer_to_a_recursive_schema_earns_zero() -> None:
    assert json_schema("[" * 900 + "]" * 900, {"items": {"$ref": "#"}}) == 0
