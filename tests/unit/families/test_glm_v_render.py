"""The chat formats of GLM-4.5V and GLM-4.6V: ends of turns, reasoning, and calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sightline import MediaRef, MediaStore, MessageError
from sightline.families import load_renderer
from sightline.families.registry import write_tiny
from sightline.message import Message, TextPart, ToolCall, assistant, system, user
from sightline.render import Bridged, Refused
from sightline.trace import PolicySpan, Trace
from sightline.trainer.sft import build_sample

TOOL = Message("tool", (TextPart("ok"),))
CALLS = Message("assistant", tool_calls=(ToolCall("look", '{"at": "here"}'),))
REF = MediaRef("0" * 64, "image/png", 28, 28, 1)
OPENED = "[gMASK]<sop><|user|>\nhi<|assistant|>\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_tiny("glm_v", root / "thinking", seed=0, thinking=True)
    write_tiny("glm_v", root / "silent", seed=0)
    write_tiny("glm_v", root / "glm4v", seed=0, type="glm4v", thinking=True)
    return root


@pytest.fixture
def thinking(folders: Path, store: MediaStore) -> Any:
    return load_renderer(folders / "thinking", store)


@pytest.fixture
def silent(folders: Path, store: MediaStore) -> Any:
    return load_renderer(folders / "silent", store)


def ids_of(renderer: Any, text: str) -> list[int]:
    """Return the tokenizer's ids, including every special token in the text."""
    ids: list[int] = renderer._tokenizer.encode_marked(text)
    return ids


# -- how turns end


def test_token_opening_the_next_turn_ends_an_answer(thinking: Any) -> None:
    completion_text = "<think>hm</think>\nyes"
    for new, opened in ((TOOL, "<|observation|>"), (assistant("more"), "<|assistant|>")):
        rendered = thinking.render([user("hi"), assistant("yes", reasoning="hm"), new])
        own = rendered.trained[0]
        assert thinking.decode(rendered.token_ids[own.start : own.stop]) == completion_text + opened
        assert rendered.spans[1].stop == rendered.spans[2].start == own.stop
        # Once for the answer, for the turn that it opens, and at the end of the prompt.
        count = 1 if new is TOOL else 3
        assert thinking.decode(rendered.token_ids).count(opened) == count


@pytest.mark.parametrize(
    ("last", "end"), [(assistant("yes"), "<|user|>"), (CALLS, "<|observation|>")], ids=str
)
def test_last_answer_gets_a_trained_end_token(thinking: Any, last: Message, end: str) -> None:
    sample = build_sample([user("hi"), last], thinking, "t")
    tokens, trained = sample.token_ids.numpy().tolist(), sample.trained.numpy().tolist()
    assert thinking.decode(tokens).startswith(OPENED + "<think></think>\n")
    assert trained[-1] == len(tokens) - 1 and thinking.decode(tokens[-1:]) == end


def test_bridge_does_not_repeat_the_sampled_stop_token(thinking: Any) -> None:
    prompt = thinking.render([user("hi")]).token_ids
    completion_text = "<think></think>\nyes"
    talk = [user("hi"), assistant("yes"), user("and?")]
    for end in ("<|user|>", ""):  # sampled, and cut off
        completion = ids_of(thinking, completion_text + end)
        bridged = thinking.bridge(prompt, completion, talk[2:])
        assert isinstance(bridged, Bridged)
        assert prompt + completion + bridged.token_ids == thinking.render(talk).token_ids
        assert thinking.decode(bridged.token_ids).startswith("<|user|>" if not end else "\nand?")
        assert bridged.spans[0].start == len(prompt) + len(completion)
    closed = thinking.bridge(prompt, ids_of(thinking, completion_text + "<|endoftext|>"), talk[2:])
    assert thinking.decode(closed.token_ids).startswith("<|user|>\nand?")


@pytest.mark.parametrize("stop", ["<|observation|>", "<|assistant|>"])
def test_turn_ended_by_another_roles_token_is_rerendered_and_forks(
    thinking: Any, stop: str
) -> None:
    trace = Trace(id="t", env="test", task=0)
    turn = trace.extend(-1, [user("hi")], thinking)
    completion = ids_of(thinking, f"<think></think>\nyes{stop}")
    leaf = turn.commit(
        completion,
        [-1.0] * len(completion),
        [PolicySpan(0, len(completion), version=0, epoch=0)],
        "stop",
    ).id
    again = trace.extend(leaf, [user("and?")], thinking)
    assert thinking.decode(again.prompt_ids).count(stop) == (2 if "assistant" in stop else 0)
    end = ids_of(thinking, "<think></think>\nyes<|user|>")
    again.commit(end, [-1.0] * len(end), [PolicySpan(0, len(end), version=0, epoch=0)], "stop")
    assert trace.forks == {"history_rewritten": 1} and len(trace.branches()) == 2
    # The conversation continues after the token that it needs.
    further = trace.extend(len(trace.nodes) - 1, [user("so?")], thinking)
    assert further.new_tokens == ids_of(thinking, "\nso?<|assistant|>\n")


# -- reasoning


def test_next_question_drops_the_reasoning(thinking: Any) -> None:
    prompt = thinking.render([user("hi")]).token_ids
    thought = ids_of(thinking, "<think>hm</think>\nyes<|user|>")
    assert thinking.bridge(prompt, thought, [user("and?")]) == Refused("history_rewritten")
    acted = ids_of(thinking, "<think>hm</think>\nyes<|observation|>")
    assert isinstance(thinking.bridge(prompt, acted, [TOOL]), Bridged)
    behind = thinking.render([user("hi"), assistant("yes", reasoning="hm"), TOOL]).token_ids
    plain = ids_of(thinking, "<think></think>\nyes<|user|>")
    assert thinking.bridge(behind, plain, [user("and?")]) == Refused("history_rewritten")
    # The template writes a block where none was sampled.
    bare = ids_of(thinking, "yes<|user|>")
    assert thinking.bridge(prompt, bare, [user("and?")]) == Refused("history_rewritten")


def test_truncated_reasoning_is_closed_and_a_stop_inside_it_is_refused(
    thinking: Any,
) -> None:
    prompt = thinking.render([user("hi")]).token_ids
    cut = ids_of(thinking, "<think>hm")
    bridged = thinking.bridge(prompt, cut, [TOOL])
    talk = [user("hi"), assistant("", reasoning="hm"), TOOL]
    assert prompt + cut + bridged.token_ids == thinking.render(talk).token_ids
    stopped = ids_of(thinking, "<think>hm<|observation|>")
    assert thinking.bridge(prompt, stopped, [TOOL]) == Refused("stop_in_reasoning")
    assert thinking.parse(stopped).reasoning == "hm"


def test_disabled_thinking_marks_questions_and_opens_an_empty_block(
    silent: Any,
) -> None:
    rendered = silent.render([system("s"), user("a"), assistant("b"), user("c/nothink")])
    head = "[gMASK]<sop><|system|>\ns<|user|>\na/nothink<|assistant|>\n<think></think>\n"
    spelled = head + "b<|user|>\nc/nothink<|assistant|>\n<think></think>\n"
    assert silent.decode(rendered.token_ids) == spelled
    # A special token in a user's text stays text.
    assert rendered.token_ids.count(silent._tokenizer.token_id("/nothink")) == 1
    with_image = silent.render([user("/nothink", REF)])
    assert silent.decode(with_image.token_ids).count("/nothink") == 2
    prompt = silent.render([user("hi")]).token_ids
    completion = ids_of(silent, "yes<|user|>")
    bridged = silent.bridge(prompt, completion, [user("and?")])
    talk = [user("hi"), assistant("yes"), user("and?")]
    assert prompt + completion + bridged.token_ids == silent.render(talk).token_ids
    # A second block would replace the empty one.
    thought = ids_of(silent, "<think>hm</think>\nyes<|observation|>")
    assert silent.bridge(prompt, thought, [TOOL]) == Refused("history_rewritten")
    assert (silent.parse(thought).reasoning, silent.parse(thought).text) == ("hm", "yes")


# -- calls

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "properties": {"at": {"type": "string"}, "to": {"type": ["string", "null"]}}
        },
    },
}


def call(*arguments: tuple[str, str]) -> str:
    pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments]
    return f"<tool_call>look\n{''.join(pairs)}</tool_call>"


def test_arguments_take_schema_types_or_their_literal_types(thinking: Any) -> None:
    completion_text = "\nlet me see\n" + call(
        ("at", "3"), ("to", "null"), ("n", "3"), ("m", "03"), ("o", "[1]")
    )
    parsed = thinking.parse(
        ids_of(thinking, f"<think>hm</think>{completion_text}<|observation|>"), [LOOK]
    )
    assert (parsed.reasoning, parsed.text) == ("hm", "let me see")
    (tool_calls,) = parsed.tool_calls
    assert tool_calls.name == "look" and parsed.malformed_calls == ()
    wanted = {"at": "3", "to": None, "n": 3, "m": "03", "o": [1]}
    assert json.loads(tool_calls.arguments) == wanted
    # Blanks between marks do not belong to the call. Blanks inside values do.
    loose = "<tool_call>look<arg_key>at</arg_key> <arg_value> x\n</arg_value></tool_call>"
    (tool_calls,) = thinking.parse(ids_of(thinking, loose), [LOOK]).tool_calls
    assert json.loads(tool_calls.arguments) == {"at": " x\n"}


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>look\n<arg_key>at</arg_key>\n</tool_call>",
        "<tool_call>look\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>look\n<arg_key>at</arg_key>so<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        "<tool_call>look\naway\n</tool_call>",
        call(("at", "x"), ("at", "y")),
        "<tool_call>look\n",
        call(("at", "x")) + " and so on",
    ],
)
def test_malformed_call_stays_in_the_content(thinking: Any, broken: str) -> None:
    completion_text = f"{call(('at', 'x'))}\n{broken}"
    parsed = thinking.parse(ids_of(thinking, f"<think></think>\n{completion_text}<|user|>"), [LOOK])
    assert parsed.tool_calls == () and parsed.malformed_calls
    assert parsed.text == completion_text.strip()


# -- supported checkpoints


@pytest.fixture
def change(folders: Path, tmp_path: Path, store: MediaStore) -> Callable[[str, str, str], Any]:
    """Loads a checkpoint whose template has other words."""

    def load(kind: str, old: str, new: str) -> Any:
        copy = Path(shutil.copytree(folders / kind, tmp_path / "copy"))
        file = copy / "chat_template.jinja"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        return load_renderer(copy, store)

    return load


def test_template_with_string_tool_results_shows_no_tool_images(
    folders: Path, store: MediaStore
) -> None:
    renderer: Any = load_renderer(folders / "glm4v", store)
    assert renderer.format_name == "GLM-4.5V" and renderer.video_refusal == ""
    whole = load_renderer(folders / "thinking", store)
    talk = [system("s"), user("hi", REF), CALLS, TOOL, TOOL, assistant("a", reasoning="b"), TOOL]
    assert renderer.render(talk).token_ids == whole.render(talk).token_ids
    messages = [user("hi"), CALLS, Message("tool", user(REF).content)]
    assert whole.render(messages).slots
    with pytest.raises(MessageError, match=r"messages\[2\]\.content\[0\].*role 'tool'"):
        renderer.render(messages)


def test_template_with_another_video_format_supports_only_images(
    change: Callable[[str, str, str], Any],
) -> None:
    renderer = change("thinking", "<|begin_of_video|><|video|>", "<|video|>")
    assert "in the chat template it writes" in renderer.video_refusal
    assert renderer.render([user(REF)]).slots
