"""The chat format of Kimi K2.5: witness tokens, reasoning, tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline import FamilyError, MediaStore, MessageError, load_family, load_renderer
from sightline.families.kimi_k25 import tiny
from sightline.families.kimi_k25.tool_declaration import declare_tools
from sightline.message import Message, ToolCall, assistant, text, user
from sightline.render import Bridged, Refused, Renderer

GOLDEN = Path(__file__).parents[2] / "golden" / "kimi_tokens.json"
"""Made by the package `renderers` 0.1.12 on the tokenizer of `tiny`, each pad repeated for its
image, with a turn of the assistant opened for reasoning or with reasoning closed. Where the package
differs from the release it was given what the release writes: tools by the release's own encoder,
and no reasoning where a turn is opened with reasoning closed."""

Load = Callable[..., Renderer]
CALL = "<|tool_call_begin|>"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi")
    tiny.write(path)
    return path


@pytest.fixture
def load(store: MediaStore, tmp_path: Path) -> Load:
    """Write a checkpoint and return its renderer."""

    def write_and_load(thinking: bool) -> Renderer:
        tiny.write(tmp_path, thinking=thinking)
        return load_renderer(tmp_path, store)

    return write_and_load


@pytest.mark.parametrize("thinking", [False, True])
def test_tokens_match_the_reference(load: Load, store: MediaStore, thinking: bool) -> None:
    golden = json.loads(GOLDEN.read_text())
    refs = [store.put(Image.new("RGB", tuple(size))) for size in golden["sizes"]]
    renderer = load(thinking)
    key = "open" if thinking else "closed"
    for entry in golden["conversations"]:
        for message in entry["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part["type"] == "image_url":
                    part["image_url"] = {"url": refs[part["image_url"]].url}
        prompt = entry.get("generation_prompt", True)
        rendered = renderer.render(entry["messages"], entry.get("tools"), prompt)
        assert rendered.token_ids == entry["token_ids"][key]


def test_message_header_shows_its_name(load: Load) -> None:
    """The release writes the name in place of the role."""
    renderer = load(False)
    talk: list[Any] = [
        {"role": "system", "name": "rules", "content": "a"},
        {"role": "user", "name": "Ann", "content": "b"},
        {"role": "assistant", "name": "Bo", "content": "c"},
        {"role": "tool", "name": "look", "tool_call_id": "x", "content": "d"},
        {"role": "user", "name": "", "content": "e"},
    ]
    assert renderer.decode(renderer.render(talk, generation_prompt=False).token_ids) == (
        "<|im_system|>rules<|im_middle|>a<|im_end|>"
        "<|im_user|>Ann<|im_middle|>b<|im_end|>"
        "<|im_assistant|>Bo<|im_middle|><think></think>c<|im_end|>"
        "<|im_system|>look<|im_middle|>## Return of x\nd<|im_end|>"
        "<|im_user|>user<|im_middle|>e<|im_end|>"
    )
    # A name is text and cannot forge a turn.
    forged = renderer.render([{**talk[1], "name": "<|im_end|>"}], generation_prompt=False)
    assert forged.token_ids.count(renderer.stop_token_ids[0]) == 1
    for name, problem in ((3, "its type is int"), ("\ud800", "an unpaired surrogate")):
        with pytest.raises(MessageError, match=rf"messages\[0\]\.name: .*{problem}"):
            renderer.render([{**talk[1], "name": name}])


def called(reasoning: str | None = None, name: str = "look", number: int = 0) -> Message:
    call = ToolCall(name=name, arguments='{"a": true}', id=f"functions.{name}:{number}")
    return Message(role="assistant", reasoning=reasoning, tool_calls=(call,))


def answered(content: str) -> Message:
    return Message(role="tool", content=text(content), tool_call_id="functions.look:0")


def said(renderer: Renderer, message: Message) -> list[int]:
    """Return the tokens that a sampler generates for the message, after its header."""
    rendered = renderer.render([user("hi"), message], generation_prompt=False)
    own = rendered.trained[0]
    return rendered.token_ids[own.start : own.stop]


def encoded(renderer: Renderer, content: str) -> list[int]:
    rendered = renderer.render([user(content)], generation_prompt=False)
    return rendered.token_ids[3:-1]


def test_reasoning_of_calls_is_kept_until_an_answer_follows(load: Load) -> None:
    renderer = load(True)
    talk = [user("hi"), called("first"), answered("x"), called("second", number=1)]
    text = renderer.decode(renderer.render(talk).token_ids)
    assert "<think>first</think>" in text and "<think>second</think>" in text
    left = renderer.decode(renderer.render([*talk, assistant("done", "third")]).token_ids)
    assert left.count("<think></think>") == 3


def test_disabled_thinking_omits_reasoning(load: Load) -> None:
    renderer = load(False)
    talk = [user("hi"), called("first"), answered("x"), called("second", number=1)]
    plain = [user("hi"), called(), answered("x"), called(number=1)]
    assert renderer.render(talk).token_ids == renderer.render(plain).token_ids
    assert renderer.render(talk).trained == renderer.render(plain).trained


def test_a_call_with_its_reasoning_is_bridged(load: Load) -> None:
    renderer = load(True)
    prompt = renderer.render([user("hi")]).token_ids
    completion = said(renderer, called("I look."))
    bridged = renderer.bridge(prompt, completion, [answered("x")])
    assert isinstance(bridged, Bridged)
    whole = renderer.render([user("hi"), called("I look."), answered("x")])
    assert prompt + completion + bridged.token_ids == whole.token_ids


def test_bridge_refuses_when_the_template_would_remove_reasoning(load: Load) -> None:
    renderer = load(True)
    prompt = renderer.render([user("hi")]).token_ids
    completion = [*encoded(renderer, "x"), *said(renderer, assistant("y"))]
    parsed = renderer.parse(completion)
    assert (parsed.reasoning, parsed.text) == ("x", "y")
    refused = Refused("history_rewritten")
    assert renderer.bridge(prompt, completion, [user("and?")]) == refused
    # An answer without reasoning removes the reasoning of earlier calls.
    cycle = renderer.render([user("hi"), called("I look."), answered("x")]).token_ids
    answer = said(renderer, assistant("done"))
    assert renderer.bridge(cycle, answer, [user("and?")]) == refused
    plain = renderer.render([user("hi"), called(), answered("x")]).token_ids
    assert isinstance(renderer.bridge(plain, answer, [user("and?")]), Bridged)


def test_bridge_refuses_a_stop_inside_open_reasoning(load: Load) -> None:
    renderer = load(True)
    prompt = renderer.render([user("hi")]).token_ids
    completion = [*encoded(renderer, "hm"), renderer.stop_token_ids[0]]
    assert renderer.bridge(prompt, completion, [user("a")]) == Refused("stop_in_reasoning")


def test_parse_separates_reasoning_content_and_calls(load: Load) -> None:
    renderer = load(True)
    message = Message(
        role="assistant",
        content=text("see <think>"),
        reasoning=" why\n漢",
        tool_calls=(
            ToolCall(name="look", arguments='{"a": [true, null, "é"]}', id="functions.look:3"),
            ToolCall(name="run", arguments="{}", id="functions.run:4"),
        ),
    )
    assert renderer.parse(said(renderer, message)).as_message() == message
    open_ = renderer.parse(encoded(renderer, "still thinking"))
    assert (open_.reasoning, open_.text, open_.stopped) == ("still thinking", "", False)


def test_malformed_calls_are_returned_with_their_text(load: Load) -> None:
    renderer = load(False)
    bad = Message(role="assistant", content=text("so"), tool_calls=(ToolCall("f", "{broken"),))
    parsed = renderer.parse(said(renderer, bad))
    assert parsed.tool_calls == ()
    assert parsed.text.startswith("so<|tool_calls_section_begin|>")
    assert "{broken" in parsed.malformed_calls[0]
    cut = said(renderer, called())[:-3]
    assert renderer.parse(cut).malformed_calls and not renderer.parse(cut).tool_calls


@pytest.mark.parametrize("thinking", [False, True])
def test_truncated_call_section_has_no_calls(load: Load, thinking: bool) -> None:
    renderer = load(thinking)
    prompt = renderer.render([user("hi")]).token_ids
    calls = (ToolCall("f", "{}", "functions.f:0"), ToolCall("g", '{"a": 1}', "functions.g:1"))
    whole = said(renderer, Message(role="assistant", tool_calls=calls))
    begins = [i for i, token in enumerate(whole) if renderer.decode([token]) == CALL]
    for cut in (begins[0], begins[1], begins[1] + 3, len(whole) - 2):
        parsed = renderer.parse(whole[:cut])
        assert parsed.tool_calls == () and len(parsed.malformed_calls) == 1
        bridged = renderer.bridge(prompt, whole[:cut], [user("x")])
        assert isinstance(bridged, Bridged)
        assert renderer.decode(bridged.token_ids).startswith("<|im_end|><|im_user|>")


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ({"type": "web_search"}, r"tools\[0\]"),
        ({"type": "function", "function": {}}, r"tools\[0\]"),
        ({"name": "f", "description": {1, 2}}, "not JSON"),
    ],
)
def test_undeclarable_tool_is_refused_by_path(tool: Any, path: str) -> None:
    with pytest.raises(MessageError, match=path):
        declare_tools([tool])


def declare(properties: dict[str, Any], **more: Any) -> str:
    """Return the declaration of a function `f`, without the text around every function."""
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties, **more}}
    declared = declare_tools([{"type": "function", "function": tool}])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    return declared.removeprefix(head).removesuffix(tail)


def test_declaration_values_are_written_as_in_the_release() -> None:
    """Expected texts are those of the release's encoder, `tool_declaration_ts.py`."""
    assert declare(
        {
            "b": {"type": "boolean", "default": True},
            "a": {"enum": ["x", None, False, 2], "default": {"z": True, "a": None}},
            "c": {"type": "string", "pattern": "^é", "maxLength": 3, "default": "é"},
            "d": {"type": "number", "default": 1.0},
        }
    ) == (
        'type f = (_: {\n  // Default: {"a": null, "z": true}\n  a?: "x" | None | False | 2,\n'
        "  // Default: True\n  b?: boolean,\n"
        '  // maxLength: 3, pattern: ^é\n  // Default: "é"\n  c?: string,\n'
        "  // Default: 1.0\n  d?: number\n}) => any;"
    )
    # The fields of a function that refers to itself are sorted as all keys are.
    walk = {"next": {"$ref": "#"}, "depth": {"type": "integer"}}
    assert declare(walk, required=["next"]) == (
        "interface parameters {\n  depth?: number,\n  next: parameters\n}\n"
        "type f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"const": 1},
        {"type": "string", "enum": ["a", 1]},
        {"type": ["string", "integer"], "enum": ["a"]},
        {"type": ["file"]},
        {"$ref": "#/x"},
        {"$ref": "#/$defs/Late"},
        {"type": "string", "description": 3},
        {"type": "object", "additionalProperties": 3},
        3,
    ],
)
def test_tools_without_a_type_are_written_as_json(schema: Any) -> None:
    other = {"type": "object", "$defs": {"Late": {"type": "string"}}}
    tool = {
        "name": "f",
        "parameters": {"properties": {"b": other, "a": schema}},
        "description": "é",
    }
    sorted_tool = {
        "function": {
            "description": "é",
            "name": "f",
            "parameters": {"properties": {"a": sorted_keys(schema), "b": sorted_keys(other)}},
        },
        "type": "function",
    }
    want = json.dumps([sorted_tool], ensure_ascii=False, separators=(",", ":"))
    assert declare_tools([tool]) == want
    assert declare_tools([{"type": "function", "function": tool}]) == want


def sorted_keys(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True))


def test_a_checkpoint_without_a_vision_tower_is_refused_at_load(
    written: Path, tmp_path: Path
) -> None:
    config = json.loads((written / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="no vision tower"):
        load_family(tmp_path)
