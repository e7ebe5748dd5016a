"""Functions as tools: their schemas, and the results that the model reads."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import pytest
from PIL import Image

from sightline.envs.tools import Toolbox, ToolError, reply_to_calls
from sightline.errors import ConfigError
from sightline.media import MediaStore
from sightline.message import AssistantMessage, ToolCall


def move(
    way: Annotated[Literal["up", "down"], "where to go"], steps: int = 1, hard: bool | None = None
) -> tuple[str, Image.Image]:
    """Moves the piece.

    More that the model is not told.
    """
    if steps > 3:
        raise ToolError("too far")
    return f"moved {way} by {steps}", Image.new("RGB", (32, 32), (steps, 0, 0))


async def look(places: list[str]) -> dict[str, int]:
    return {place: len(place) for place in places}


def calls(*pairs: tuple[str, str]) -> AssistantMessage:
    tool_calls = tuple(ToolCall(name, text, f"c{i}") for i, (name, text) in enumerate(pairs))
    return AssistantMessage(role="assistant", tool_calls=tool_calls)


def run(answer: AssistantMessage, store: MediaStore) -> list[Any]:
    return asyncio.run(Toolbox(move, look).run(answer, store.put))


def test_tool_schema_is_derived_from_the_function() -> None:
    schema = Toolbox(move).schemas[0]["function"]
    assert schema["name"] == "move" and schema["description"] == "Moves the piece."
    assert schema["parameters"]["required"] == ["way"]
    assert schema["parameters"]["properties"] == {
        "way": {"enum": ["up", "down"], "description": "where to go"},
        "steps": {"type": "integer", "default": 1},
        "hard": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
    }


@pytest.mark.parametrize(
    ("said", "values"),
    [
        (calls(("move", '{"way": "up", "steps": 2}')), {"way": "up", "steps": 2}),
        (calls(("move", '{"way": "left"}')), None),
        (calls(("move", '{"way": "up", "steps": true}')), None),
        (calls(("move", '{"way": "up", "far": 1}')), None),
        (calls(("move", "not json")), None),
        (calls(("jump", "{}")), None),
        (calls(*[("move", '{"way": "up"}')] * 2), None),
        (calls(), None),
    ],
)
def test_one_valid_call_is_parsed_and_other_input_gives_none(
    said: AssistantMessage, values: dict[str, Any] | None
) -> None:
    assert Toolbox(move).read(said) == values


def test_each_call_gets_a_result_and_the_last_one_holds_the_parts() -> None:
    first, last = reply_to_calls(calls(("move", "{}"), ("move", "{}")), "look")
    assert (first.role, first.text, first.tool_call_id) == ("tool", "not done", "c0")
    assert (last.role, last.text, last.tool_call_id) == ("tool", "look", "c1")
    assert [message.role for message in reply_to_calls(None, "look")] == ["user"]


def test_untyped_tool_parameter_is_refused() -> None:
    def untyped(x) -> str:  # type: ignore[no-untyped-def]
        return ""

    def strange(x: object) -> str:
        return ""

    for function in (untyped, strange):
        with pytest.raises(ConfigError, match="parameter x"):
            Toolbox(function)


def test_results_are_text_images_and_json(store: MediaStore) -> None:
    tool_message = calls(
        ("move", '{"way": "up", "steps": 2}'), ("look", '{"places": ["sea", "hill"]}')
    )
    moved, looked = run(tool_message, store)
    assert moved.role == "tool" and moved.tool_call_id == "c0" and moved.text == "moved up by 2"
    assert store.image(moved.images[0]).getpixel((0, 0)) == (2, 0, 0)
    assert looked.text == '{"sea":3,"hill":4}'


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("jump", "{}"), "no tool 'jump'. There are move, look"),
        (("move", "{"), "the arguments are not JSON"),
        (("move", "[1]"), "not an object"),
        (("move", "{}"), "missing arguments: way"),
        (("move", '{"way": "up", "far": 1}'), "unknown arguments: far"),
        (("move", '{"way": "left"}'), "way: Invalid enum value"),
        (("move", '{"way": "up", "steps": "two"}'), "steps: Expected `int`, got `str`"),
        (("move", '{"way": "up", "steps": 9}'), "too far"),
    ],
)
def test_model_mistakes_are_returned_to_the_model(
    store: MediaStore, call: tuple[str, str], told: str
) -> None:
    (answer,) = run(calls(call), store)
    assert answer.text.startswith("error: ") and told in answer.text


def test_tool_failure_is_not_blamed_on_the_model(store: MediaStore) -> None:
    def broken() -> str:
        raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"):
        asyncio.run(Toolbox(broken).run(calls(("broken", "{}")), store.put))
