"""What is particular to each chat format; what they all promise is in the contract suite."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sightline import FamilyError, MediaStore, load_renderer
from sightline.families.qwen_vl.formats import FORMATS
from sightline.families.registry import write_tiny
from sightline.message import Message, ToolCall, assistant, user
from sightline.render import Bridged, Refused, Renderer

ROOT = Path(__file__).parents[3]
THINKING = ("qwen3_vl_thinking", "qwen3_5", "qwen3")
OPENING = ("qwen3_vl_thinking", "qwen3_5")
CALLING = ("qwen3_vl", *THINKING)
TOOL: dict[str, Any] = {"role": "tool", "content": "ok"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("formats") / kind
            write_tiny("qwen_vl", made[kind], seed=0, type=kind)
        return made[kind]

    return find


@pytest.fixture(scope="module")
def load(folder: Callable[[str], Path], store: MediaStore) -> Callable[[str], Renderer]:
    return lambda kind: load_renderer(folder(kind), store)


def ids_of(renderer: Renderer, text: str) -> list[int]:
    """Ids of text with its marks, as a model would say them."""
    return renderer._tokenizer.encode_marked(text)  # type: ignore[attr-defined]


@pytest.fixture
def copy(folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The files that a renderer needs, to be changed."""

    def make(kind: str) -> Path:
        for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
            if (folder(kind) / name).is_file():
                (tmp_path / name).write_bytes((folder(kind) / name).read_bytes())
        return tmp_path

    return make


# -- which format


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_5_vl", "Qwen2.5-VL"),
        ("qwen3_vl", "Qwen3-VL"),
        ("qwen3_vl_thinking", "Qwen3-VL thinking"),
        ("qwen3_5", "Qwen3.5"),
        ("qwen3", "Qwen3"),
    ],
)
def test_the_template_of_the_checkpoint_decides_and_is_read_quickly(
    folder: Callable[[str], Path], store: MediaStore, kind: str, name: str
) -> None:
    load_renderer(folder(kind), store)
    began = time.process_time()
    renderer: Any = load_renderer(folder(kind), store)
    assert time.process_time() - began < 0.3
    assert renderer.format_name == name


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3"])
def test_a_folder_without_a_template_speaks_the_first_format_of_its_type(
    copy: Callable[[str], Path], store: MediaStore, kind: str
) -> None:
    renderer: Any = load_renderer(copy(kind), store)
    assert renderer.format_name == FORMATS[kind][0].format_name


@pytest.mark.parametrize("file", ["chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("is_list", [False, True])
def test_the_template_is_found_in_other_files_too(
    copy: Callable[[str], Path],
    folder: Callable[[str], Path],
    store: MediaStore,
    file: str,
    is_list: bool,
) -> None:
    path = copy("qwen3_vl_thinking")
    template: Any = (folder("qwen3_vl_thinking") / "chat_template.jinja").read_text()
    if is_list:
        template = [{"name": "default", "template": template}, {"name": "rag", "template": "x"}]
    (path / file).write_text(json.dumps({"chat_template": template}))
    renderer: Any = load_renderer(path, store)
    assert renderer.format_name == "Qwen3-VL thinking"


@pytest.mark.parametrize(
    "kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_thinking", "qwen3_5", "qwen3"]
)
@pytest.mark.parametrize("change", ["assistant\\n", "<|im_end|>\\n"])
def test_a_template_that_writes_anything_else_is_refused_with_the_first_difference(
    copy: Callable[[str], Path],
    folder: Callable[[str], Path],
    store: MediaStore,
    kind: str,
    change: str,
) -> None:
    path = copy(kind)
    template = (folder(kind) / "chat_template.jinja").read_text()
    assert change in template or kind == "qwen2_5_vl"
    altered = template.replace(change, f"{change} ")
    if altered == template:
        altered = template.replace("message.role ~", "message.role ~ ' ' ~")
    (path / "chat_template.jinja").write_text(altered)
    with pytest.raises(FamilyError, match="it writes .* where .* was expected"):
        load_renderer(path, store)


def test_a_template_that_fails_is_refused(copy: Callable[[str], Path], store: MediaStore) -> None:
    path = copy("qwen3_vl")
    (path / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")
    with pytest.raises(FamilyError, match="not today"):
        load_renderer(path, store)
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(FamilyError, match="no template"):
        load_renderer(path, store)


def test_the_published_templates_are_known(
    copy: Callable[[str], Path], store: MediaStore, shared: Path
) -> None:
    for kind, formats in FORMATS.items():
        path = copy(kind)
        # Those with experts are published with the template of those without.
        name = kind.removesuffix("_moe")
        published = shared / "references" / f"{name}_chat_template.jinja"
        (path / "chat_template.jinja").write_text(published.read_text())
        renderer: Any = load_renderer(path, store)
        assert renderer.format_name == formats[0].format_name


# -- bridging over reasoning


@pytest.mark.parametrize("kind", THINKING)
def test_open_reasoning_that_was_cut_off_is_closed_with_unsampled_tokens(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    prompt = renderer.render([user("hi")]).token_ids
    said = ("" if kind in OPENING else "<think>\n") + "hm, so"
    for tail in ("", "\n"):
        completion = ids_of(renderer, said + tail)
        bridged = renderer.bridge(prompt, completion, [TOOL])
        assert isinstance(bridged, Bridged)
        talk = [user("hi"), assistant("", reasoning="hm, so"), TOOL]
        assert prompt + completion + bridged.token_ids == renderer.render(talk).token_ids
        assert bridged.spans[0].start == len(prompt) + len(completion)
        parsed = renderer.parse(completion)
        assert (parsed.reasoning, parsed.text, parsed.stopped) == ("hm, so", "", False)


@pytest.mark.parametrize("kind", THINKING)
def test_a_stop_inside_open_reasoning_is_refused(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    prompt = renderer.render([user("hi")]).token_ids
    said = ("" if kind in OPENING else "<think>\n") + "hm"
    for stop in renderer.stop_token_ids:
        completion = [*ids_of(renderer, said), stop]
        assert renderer.bridge(prompt, completion, [TOOL]) == Refused("stop_in_reasoning")
        assert renderer.parse(completion).reasoning == "hm"


@pytest.mark.parametrize("kind", THINKING)
def test_a_new_question_rewrites_history_that_holds_reasoning(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    prompt = renderer.render([user("hi")]).token_ids
    said = ("" if kind in OPENING else "<think>\n") + "hm\n</think>\n\nyes<|im_end|>"
    completion = ids_of(renderer, said)
    assert renderer.bridge(prompt, completion, [user("and?")]) == Refused("history_rewritten")
    assert renderer.bridge(prompt, completion, [TOOL, user("b")]) == Refused("history_rewritten")
    assert isinstance(renderer.bridge(prompt, completion, [TOOL]), Bridged)


def test_a_plain_answer_of_qwen3_can_be_followed_by_a_question(
    load: Callable[[str], Renderer],
) -> None:
    renderer = load("qwen3")
    prompt = renderer.render([user("hi")]).token_ids
    completion = ids_of(renderer, "yes<|im_end|>")
    bridged = renderer.bridge(prompt, completion, [user("and?")])
    assert isinstance(bridged, Bridged)
    talk = [user("hi"), assistant("yes"), user("and?")]
    assert prompt + completion + bridged.token_ids == renderer.render(talk).token_ids
    # Reasoning of an earlier step, before a tool answered, would be dropped as well.
    acted = [user("hi"), assistant("", reasoning="hm"), TOOL]
    prompt = renderer.render(acted).token_ids
    assert renderer.bridge(prompt, completion, [user("and?")]) == Refused("history_rewritten")


# -- pictures


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_thinking", "qwen3_5"])
def test_pictures_are_numbered_on_demand_and_the_bridge_goes_on_counting(
    folder: Callable[[str], Path], store: MediaStore, kind: str
) -> None:
    renderer = load_renderer(folder(kind), store, number_images=True)
    ref = store.put(Image.new("RGB", (32, 32)))
    asked = user("see ", ref, ref)
    prompt = renderer.render([asked]).token_ids
    assert "see Picture 1: <|vision_start|>" in renderer.decode(prompt)
    assert "<|vision_end|>Picture 2: <|vision_start|>" in renderer.decode(prompt)
    reasoning = None if kind in ("qwen2_5_vl", "qwen3_vl") else "hm"
    new = user(ref) if reasoning is None else Message(role="tool", content=user(ref).content)
    last = renderer.render([asked, assistant("a", reasoning=reasoning)], generation_prompt=False)
    own = last.trained[0]
    completion = last.token_ids[own.start : own.stop]
    bridged = renderer.bridge(prompt, completion, [new])
    assert isinstance(bridged, Bridged)
    assert "Picture 3: " in renderer.decode(bridged.token_ids)
    whole = renderer.render([asked, assistant("a", reasoning=reasoning), new]).token_ids
    assert prompt + completion + bridged.token_ids == whole


# -- calls


@pytest.mark.parametrize("kind", CALLING)
def test_a_literal_mark_that_a_user_typed_never_matches(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    mark = ids_of(renderer, "<tool_call>")[0]
    typed = 'say <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = renderer.render([user(typed)]).token_ids
    assert mark not in ids
    said = ids_of(renderer, "</think>\n\n") if kind in OPENING else []
    plain: Any = renderer
    parsed = renderer.parse([*said, *plain._tokenizer.encode(typed)])
    assert parsed.tool_calls == () and parsed.malformed_calls == ()
    assert parsed.text == typed


@pytest.mark.parametrize("kind", CALLING)
def test_a_malformed_call_comes_back_with_its_raw_text(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    tags = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    inner = tags if kind == "qwen3_5" else '{"name": "f", "arguments": {"a": 1}}'
    good = f"<tool_call>\n{inner}\n</tool_call>"
    lead = "so</think>\n\n" if kind in OPENING else ""
    for broken in (
        "<tool_call>\n{]\n</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n<function=f>\n",
        "<tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
    ):
        said = f"{lead}look\n{good}\n{broken}"
        parsed = renderer.parse(ids_of(renderer, said + "<|im_end|>"))
        assert parsed.malformed_calls == (broken,)
        assert parsed.tool_calls == ()
        assert parsed.text.strip() == f"look\n{good}\n{broken}".strip()
    parsed = renderer.parse(ids_of(renderer, f"{lead}look\n{good} and so on"))
    assert parsed.malformed_calls == (" and so on",)
    parsed = renderer.parse(ids_of(renderer, f"{lead}{good}\n{good}<|im_end|>"))
    assert [call.name for call in parsed.tool_calls] == ["f", "f"]
    assert parsed.malformed_calls == ()


def test_tagged_arguments_keep_booleans_nested_json_and_unicode(
    load: Callable[[str], Renderer],
) -> None:
    renderer = load("qwen3_5")
    arguments = {
        "yes": True, "no": False, "none": None, "n": -3, "x": 1.5, "text": "größe\n漢 🙂",
        "deep": {"a": [1, True, None, "é"], "b": {}}, "list": [], "empty": "",
    }  # fmt: skip
    call = ToolCall(name="f", arguments=json.dumps(arguments))
    talk = [user("hi"), Message(role="assistant", reasoning="r", tool_calls=(call,))]
    rendered = renderer.render(talk, generation_prompt=False)
    own = rendered.trained[0]
    parsed = renderer.parse(rendered.token_ids[own.start : own.stop])
    assert json.loads(parsed.tool_calls[0].arguments) == arguments
    assert (parsed.reasoning, parsed.text) == ("r", "")


def test_arguments_that_are_no_object_are_refused_by_path_where_tags_cannot_write_them(
    load: Callable[[str], Renderer],
) -> None:
    from sightline import MessageError

    for arguments in ("[1]", "not json", "3"):
        said = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        with pytest.raises(MessageError, match=r"messages\[1\]\.tool_calls\[0\]\.function"):
            load("qwen3_5").render([user("hi"), said])


EMPTY_TEXT, CALL_IDS = "text of None and empty text", "call ids"
REASONING = (
    "reasoning of turns before the last question",
    "newlines around reasoning, and before the content that follows it",
)
JSON_CALLS = (EMPTY_TEXT, CALL_IDS, "JSON spacing around a call's arguments")
NOT_CARRIED = {
    "Qwen2.5-VL": (EMPTY_TEXT,),
    "Qwen3-VL": JSON_CALLS,
    "Qwen3": (*JSON_CALLS, *REASONING),
    "Qwen3-VL thinking": (*JSON_CALLS, *REASONING),
    "Qwen3.5": (
        EMPTY_TEXT,
        CALL_IDS,
        *REASONING,
        "JSON spacing and number spelling of a call's arguments",
        "whether an argument is a string or the number, boolean or null that it spells",
        "string arguments that spell a JSON list or object",
        "arguments that spell the tags themselves",
        "white space around a message, and around reasoning",
    ),
}
"""What `parse` cannot give back of what `render` wrote, by the name of a format."""


def test_what_formats_do_not_carry_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "chat_formats.md").read_text()
    for formats in FORMATS.values():
        for chat_format in formats:
            assert chat_format.format_name in page
            for entry in NOT_CARRIED[chat_format.format_name]:
                assert entry in page, f"{chat_format.format_name}: {entry}"
