"""Details of each chat format. The contract suite tests what all share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sightline import FamilyError, MediaStore, MessageError, load_renderer
from sightline.families.qwen_vl.formats import FORMATS
from sightline.families.registry import write_tiny
from sightline.message import Message, ToolCall, assistant, user
from sightline.render import Bridged, Refused, Renderer
from sightline.trace import PolicySpan, Trace

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
    folders: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("formats") / kind
            write_tiny("qwen_vl", folders[kind], seed=0, type=kind)
        return folders[kind]

    return find


@pytest.fixture(scope="module")
def load(folder: Callable[[str], Path], store: MediaStore) -> Callable[[str], Renderer]:
    return lambda kind: load_renderer(folder(kind), store)


def ids_of(renderer: Renderer, text: str) -> list[int]:
    """Return the ids of text with its special tokens, as a model would sample them."""
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
        ("qwen3_5_nonthinking", "Qwen3.5 non-thinking"),
        ("qwen3_5_moe", "Qwen3.5"),
        ("qwen3", "Qwen3"),
    ],
)
def test_checkpoint_template_selects_the_format_quickly(
    folder: Callable[[str], Path], store: MediaStore, kind: str, name: str
) -> None:
    load_renderer(folder(kind), store)
    began = time.process_time()
    renderer: Any = load_renderer(folder(kind), store)
    assert time.process_time() - began < 0.3
    why = "because it produces the same tokens as the folder's chat template"
    assert f"chat format: {name}, {why}" in renderer.describe()


@pytest.mark.parametrize("file", ["chat_template.json", "tokenizer_config.json"])
@pytest.mark.parametrize("is_list", [False, True])
def test_template_is_also_found_in_other_files(
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
def test_unknown_template_is_refused_with_its_first_difference(
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
    with pytest.raises(FamilyError, match="it writes .* after .*, where .* was expected"):
        load_renderer(path, store)


def test_published_templates_are_recognized(
    copy: Callable[[str], Path], store: MediaStore, shared: Path
) -> None:
    for kind, formats in FORMATS.items():
        path = copy(kind)
        # Models with experts are published with the template of dense models.
        name = kind.removesuffix("_moe")
        published = shared / "references" / f"{name}_chat_template.jinja"
        (path / "chat_template.jinja").write_text(published.read_text())
        renderer: Any = load_renderer(path, store)
        assert renderer.format_name == formats[0].format_name


# -- bridging over reasoning


@pytest.mark.parametrize("kind", THINKING)
def test_truncated_reasoning_is_closed_with_unsampled_tokens(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    prompt = renderer.render([user("hi")]).token_ids
    completion_text = ("" if kind in OPENING else "<think>\n") + "hm, so"
    for tail in ("", "\n"):
        completion = ids_of(renderer, completion_text + tail)
        bridged = renderer.bridge(prompt, completion, [TOOL])
        assert isinstance(bridged, Bridged)
        talk = [user("hi"), assistant("", reasoning="hm, so"), TOOL]
        assert prompt + completion + bridged.token_ids == renderer.render(talk).token_ids
        assert bridged.spans[0].start == len(prompt) + len(completion)
        parsed = renderer.parse(completion)
        assert (parsed.reasoning, parsed.text, parsed.stopped) == ("hm, so", "", False)


def test_answer_follows_a_closed_block_and_a_question_rewrites_history(
    load: Callable[[str], Renderer],
) -> None:
    renderer = load("qwen3_5_nonthinking")
    prompt = renderer.render([user("hi")]).token_ids
    assert renderer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    completion = ids_of(renderer, "yes<|im_end|>")
    assert (renderer.parse(completion).reasoning, renderer.parse(completion).text) == (None, "yes")
    bridged = renderer.bridge(prompt, completion, [TOOL])
    assert isinstance(bridged, Bridged)
    whole = renderer.render([user("hi"), assistant("yes"), TOOL])
    assert prompt + completion + bridged.token_ids == whole.token_ids
    own = whole.trained[0]
    assert whole.token_ids[own.start : own.stop] == completion
    assert renderer.bridge(prompt, completion, [user("and?")]) == Refused("history_rewritten")
    # A second block would replace the empty one.
    thought = ids_of(renderer, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    assert renderer.bridge(prompt, thought, [TOOL]) == Refused("history_rewritten")


# -- calls


@pytest.mark.parametrize("kind", CALLING)
def test_malformed_call_is_returned_with_its_raw_text(
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
        completion_text = f"{lead}look\n{good}\n{broken}"
        parsed = renderer.parse(ids_of(renderer, completion_text + "<|im_end|>"))
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


def test_non_object_arguments_are_refused_by_path_in_tagged_formats(
    load: Callable[[str], Renderer],
) -> None:
    for arguments in ("[1]", "not json", "3", '{"x": NaN}', '{"x": -Infinity}'):
        messages = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
        with pytest.raises(MessageError, match=r"messages\[1\]\.tool_calls\[0\]\.function"):
            load("qwen3_5").render([user("hi"), messages])


@pytest.mark.parametrize("kind", CALLING)
def test_lone_surrogate_and_endless_nesting_are_malformed_calls(
    load: Callable[[str], Renderer], kind: str
) -> None:
    renderer = load(kind)
    lead = "so</think>\n\n" if kind in OPENING else ""
    for value in (r'["\ud800"]', r'{"\udc00": 1}', "[" * 5000 + "]" * 5000):
        tags = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        inner = tags if kind == "qwen3_5" else f'{{"name": "f", "arguments": {{"a": {value}}}}}'
        parsed = renderer.parse(ids_of(renderer, f"{lead}<tool_call>\n{inner}\n</tool_call>"))
        assert msgspec.msgpack.encode(parsed)
        if kind == "qwen3_5" and value.startswith("[["):
            # Text that is not valid JSON is a string, as elsewhere in this format.
            assert json.loads(parsed.tool_calls[0].arguments) == {"a": value}
        else:
            assert parsed.tool_calls == () and parsed.malformed_calls


@pytest.mark.parametrize("kind", THINKING)
def test_call_ends_unclosed_reasoning(load: Callable[[str], Renderer], kind: str) -> None:
    renderer = load(kind)
    prompt = renderer.render([user("hi")]).token_ids
    lead = "" if kind in OPENING else "<think>\n"
    tags = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    inner = tags if kind == "qwen3_5" else '{"name": "f", "arguments": {"a": 1}}'
    call = f"<tool_call>\n{inner}\n</tool_call>"
    completion = ids_of(renderer, f"{lead}hm\n{call}<|im_end|>")
    parsed = renderer.parse(completion)
    assert (parsed.reasoning, parsed.text, parsed.malformed_calls) == ("hm", "", ())
    assert [call.name for call in parsed.tool_calls] == ["f"]
    bridged = renderer.bridge(prompt, completion, [TOOL])
    assert isinstance(bridged, Bridged)
    assert renderer.decode(bridged.token_ids).startswith("\n<|im_start|>user\n<tool_response>")
    # A call that was cut off is malformed. Before the end of a block, it was a draft.
    cut = renderer.parse(ids_of(renderer, f"{lead}hm\n<tool_call>\n{inner[:9]}"))
    assert cut.reasoning == "hm" and cut.malformed_calls and cut.text.startswith("<tool_call>")
    draft = renderer.parse(ids_of(renderer, f"{lead}hm {call} no\n</think>\n\nyes<|im_end|>"))
    assert (draft.reasoning, draft.text) == (f"hm {call} no", "yes")
    assert draft.tool_calls == draft.malformed_calls == ()


def declare(**properties: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return [{"type": "function", "function": {"name": "g"}}, {"function": function}]


def test_tagged_arguments_are_strings_if_the_schema_says_so(
    load: Callable[[str], Renderer],
) -> None:
    renderer = load("qwen3_5")
    arguments = {
        "plain": "42", "flag": "true", "nested": '{"a": 1}', "one": "7", "maybe": "None",
        "perhaps": "3", "either": "[]",
    }  # fmt: skip
    tools = declare(
        plain={"type": "string"},
        flag={"type": ["string"]},
        nested={"type": "string", "description": "JSON"},
        one={"enum": ["7", "8"]},
        maybe={"type": ["string", "null"]},
        perhaps={"anyOf": [{"type": "string"}, {"type": "null"}]},
        either={"anyOf": [{"type": "string"}, {"type": "integer"}]},
    )
    call = ToolCall(name="f", arguments=json.dumps(arguments))
    talk = [user("hi"), Message(role="assistant", reasoning="r", tool_calls=(call,))]
    rendered = renderer.render(talk, tools, generation_prompt=False)
    own = rendered.trained[0]
    completion = rendered.token_ids[own.start : own.stop]
    (parsed,) = renderer.parse(completion, tools).tool_calls
    # Values without a type in the schema get the type that the template would write this way.
    assert json.loads(parsed.arguments) == {**arguments, "maybe": None, "either": []}
    for other in (None, [], [{"name": "f"}], [{"name": "f", "parameters": 3}], [3]):
        (untold,) = renderer.parse(completion, other).tool_calls  # type: ignore[arg-type]
        assert json.loads(untold.arguments)["plain"] == 42


def test_turn_is_parsed_with_its_own_tools(
    load: Callable[[str], Renderer],
) -> None:
    renderer, tools = load("qwen3_5"), declare(a={"type": "string"})
    turn = Trace(id="a").prepare([user("hi")], renderer, tools)
    inner = "<function=f>\n<parameter=a>\n42\n</parameter>\n</function>"
    completion_text = f"hm\n</think>\n\n<tool_call>\n{inner}\n</tool_call><|im_end|>"
    completion = ids_of(renderer, completion_text)
    spans = [PolicySpan(0, len(completion), version=0, epoch=0)]
    node = turn.commit(completion, [-1.0] * len(completion), spans, "stop")
    assert json.loads(node.message.tool_calls[0].arguments) == {"a": "42"}
    with pytest.raises(MessageError, match="^tools: this is not JSON"):
        Trace(id="a").prepare([user("hi")], renderer, [{"name": "\ud800"}])


def test_a_tokenizer_larger_than_the_model_is_refused(
    copy: Callable[[str], Path], store: MediaStore
) -> None:
    path = copy("qwen3_vl")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["vocab_size"] = 100
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match="100"):
        load_renderer(path, store)
