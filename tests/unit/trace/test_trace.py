"""Prompts, commits and lookups: where nodes go and what is refused."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from sightline.errors import MessageError, Misaligned, PixelMismatch
from sightline.message import AssistantMessage, assistant, system, text, user
from sightline.render import Bridged, Rendered
from sightline.trace import Node, PolicySpan, Trace, encode_trace
from sightline.trace.node import ROOT, float32_array, int32_array
from sightline.wire import Slot, Span
from tests.unit.trace.toy import (
    END,
    LETTER,
    NEWLINE,
    PAD,
    START,
    TOOL,
    ToyRenderer,
    item,
    picture,
    say,
    talk,
)

TOY = ToyRenderer()


def spans(count: int, version: int = 0) -> list[PolicySpan]:
    return [PolicySpan(0, count, version=version, epoch=0)]


def test_conversation_is_one_path_with_one_node_per_message() -> None:
    trace = Trace(id="t")
    first = talk(trace, ([system("s"), user("hi")], "yes"))
    last = talk(trace, ([user("go", picture(2))], "no"), leaf=first)
    assert trace.branches() == [[0, 1, 2, 3, 4]] == [trace.path(last)]
    assert [node.message.role for node in trace.nodes] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert trace.nodes[4].message == assistant("no")
    assert trace.forks == {}
    assert (trace.num_images_shown, trace.num_sampled) == (1, 7)
    assert trace.num_tokens == len(trace.tokens(trace.path(last)))


def test_closing_tokens_of_a_truncated_turn_open_the_next_node() -> None:
    trace = Trace(id="t")
    cut = say(trace.extend(ROOT, [user("hi")], TOY), "abc", stop=False)
    turn = trace.extend(cut.id, [user("go")], TOY)
    say(turn, "b")
    after = trace.nodes[cut.id + 1]
    assert after.message == user("go")
    assert after.token_ids.numpy().tolist()[:3] == [END, NEWLINE, START]
    assert not after.is_turn


def test_extend_renders_only_the_new_messages() -> None:
    class Counting(ToyRenderer):
        num_rendered = 0

        def read_messages(self, messages):
            self.seen += len(messages)
            return super().read_messages(messages)

        def render(self, messages, tools=None, generation_prompt=True):
            assert not trace.nodes, "history is rendered again"
            return super().render(messages, tools, generation_prompt)

    renderer, trace = Counting(), Trace(id="t")
    leaf, per_turn = ROOT, []
    for _ in range(20):
        renderer.seen = 0
        turn = trace.extend(leaf, [user("go", picture(1))], renderer)
        per_turn.append(renderer.seen)
        assert turn.new_tokens == turn.prompt_ids[-len(turn.new_tokens) :]
        leaf = say(turn, "ab").id
    assert set(per_turn) == {2}  # read by the server, and by the bridge or the rendering


def test_repeated_prompt_shares_its_nodes() -> None:
    trace = Trace(id="t")
    first = talk(trace, ([user("hi")], "yes"))
    talk(trace, ([user("go", picture(1))], "a"), leaf=first)
    talk(trace, ([user("go", picture(1))], "b"), leaf=first)
    say(trace.prepare([user("hi"), assistant("yes"), user("go", picture(1))], TOY), "c")
    assert trace.branches() == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    assert trace.forks == {"resampled": 2}
    assert trace.num_images_shown == 1


def test_an_edited_message_forks_where_it_differs() -> None:
    trace = Trace(id="t")
    first = talk(trace, ([system("s"), user("hi")], "yes"))
    talk(trace, ([user("go")], "a"), leaf=first)
    say(trace.prepare([system("s"), user("hi"), assistant("yes"), user("stop")], TOY), "b")
    assert trace.branches() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]
    say(trace.prepare([system("s"), user("ho")], TOY), "c")
    assert trace.path(len(trace.nodes) - 1) == [0, 7, 8]
    assert trace.forks == {"diverged": 2}


def test_edited_answer_is_rendered_whole_and_shares_equal_tokens() -> None:
    trace = Trace(id="t")
    first = talk(trace, ([user("hi")], "yes"))
    talk(trace, ([user("go")], "a"), leaf=first)
    history = [user("hi"), assistant("yes"), user("go"), assistant("edited"), user("on")]
    node = say(trace.prepare(history, TOY), "b")
    assert trace.path(node.id)[:3] == [0, 1, 2]
    assert not trace.nodes[trace.path(node.id)[3]].is_turn
    assert trace.forks == {"assistant_among_new": 1}


def test_a_rendering_shares_sampled_nodes_with_the_same_tokens_and_images() -> None:
    trace = Trace(id="t")
    leaf = talk(trace, ([user(picture(1))], "x"), ([user(picture(2))], "y"))
    node = say(trace.extend(leaf, [user("?", picture(1))], TOY), "z")
    assert trace.path(node.id) == [0, 1, 2, 3, 4, 5]
    assert trace.num_images_shown == 3


def test_images_with_other_settings_are_not_shared() -> None:
    class Other(ToyRenderer):
        def render(self, messages, tools=None, generation_prompt=True):
            good = super().render(messages, tools, generation_prompt)
            slots = [
                replace(slot, item=replace(slot.item, fingerprint="toy-2")) for slot in good.slots
            ]
            return Rendered(good.token_ids, slots, good.spans, good.trained)

    trace = Trace(id="t")
    talk(trace, ([user(picture(1))], "x"))
    turn = trace.extend(ROOT, [user(picture(1))], Other())
    node = turn.commit([150], [-1], spans(1), "length", ["other pixels"])
    assert trace.branches() == [[0, 1], [2, node.id]]
    assert trace.slots(trace.path(node.id)) == turn.slots


def test_turn_with_extra_tokens_is_not_shared_with_its_rendering() -> None:
    trace = Trace(id="t")
    ids = [LETTER + ord("x"), END, NEWLINE, START]
    answer = AssistantMessage(role="assistant", content=text("x"))
    turn = trace.extend(ROOT, [user("hi")], TOY)
    node = turn.commit(ids, [-1.0] * 4, spans(4), "length", message=answer)
    after = say(trace.extend(node.id, [user("?")], TOY), "y")
    assert trace.path(after.id)[0] == 0 and node.id not in trace.path(after.id)


def test_different_tools_make_a_different_prompt() -> None:
    trace = Trace(id="t")
    first = say(trace.extend(ROOT, [user("hi")], TOY, TOOL), "a")
    say(trace.extend(first.id, [user("go")], TOY, TOOL), "b")
    bare = say(trace.extend(first.id, [user("go")], TOY), "c")
    assert trace.forks == {"tools_changed": 1}
    assert first.id not in trace.path(bare.id)
    assert len(trace.toolsets) == 1
    assert [node.tools for node in trace.turns] == [0, 0, -1]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"completion_ids": []}, "0 tokens"),
        ({"logprobs": [-1.0]}, "1 logprobs"),
        ({"logprobs": [-1.0, math.nan]}, "not finite"),
        ({"logprobs": [-1.0, -math.inf]}, "not finite"),
        ({"finish_reason": ""}, "finish reason ''"),
        ({"versions": []}, "versions cover"),
        ({"versions": spans(1)}, "versions cover"),
        ({"versions": spans(3)}, "versions cover"),
        ({"versions": [*spans(2), *spans(2)]}, "versions cover"),
        ({"versions": [PolicySpan(0, 0, version=0, epoch=0), *spans(2)]}, "versions cover"),
        ({"pixel_digests": []}, "0 pixel digests for 1 slots"),
        ({"pixel_digests": ["a", "b"]}, "2 pixel digests for 1 slots"),
        ({"completion_ids": [PAD, END]}, "media pads"),
    ],
)
def test_a_misaligned_answer_is_refused_and_adds_nothing(changed: dict, says: str) -> None:
    trace = Trace(id="t")
    turn = trace.extend(ROOT, [user("hi", picture(1))], TOY, TOOL)
    before = encode_trace(trace)
    good = {
        "completion_ids": [150, END],
        "logprobs": [-1.0, -2.0],
        "versions": spans(2),
        "finish_reason": "stop",
        "pixel_digests": ["a"],
    }
    with pytest.raises(Misaligned, match=says):
        turn.commit(**(good | changed))
    assert encode_trace(trace) == before
    turn.commit(**good)
    assert len(trace.nodes) == 2


def test_changed_pixels_of_an_old_image_are_refused() -> None:
    trace = Trace(id="t")
    leaf = talk(trace, ([user(picture(1))], "a"))
    turn = trace.extend(leaf, [user(picture(2))], TOY)
    before = encode_trace(trace)
    with pytest.raises(PixelMismatch, match="reported pixels-.* before"):
        turn.commit([150], [-1], spans(1), "length", ["other", "new"])
    assert encode_trace(trace) == before


def test_pixels_are_compared_across_a_turn_without_digests() -> None:
    trace = Trace(id="t")
    leaf = talk(trace, ([user(picture(1))], "a"))
    leaf = trace.extend(leaf, [user("on")], TOY).commit([150, END], [-1, -1], spans(2), "stop").id
    with pytest.raises(PixelMismatch):
        trace.extend(leaf, [user("on")], TOY).commit([150], [-1], spans(1), "length", ["other"])


def test_changed_pixels_of_a_shared_prompt_are_refused() -> None:
    trace = Trace(id="t")
    one, two = (trace.extend(ROOT, [user(picture(1))], TOY) for _ in range(2))
    one.commit([150], [-1], spans(1), "length", ["seen"])
    with pytest.raises(PixelMismatch, match="reports pixels other"):
        two.commit([150], [-1], spans(1), "length", ["other"])
    assert len(trace.nodes) == 2


def test_an_unknown_leaf_and_an_empty_history_are_refused() -> None:
    trace = Trace(id="t")
    with pytest.raises(Misaligned, match="has no node 3"):
        trace.extend(3, [user("hi")], TOY)
    with pytest.raises(MessageError, match="empty"):
        trace.prepare([], TOY)


def test_renderer_with_non_tiling_spans_is_refused() -> None:
    class Broken(ToyRenderer):
        def render(self, messages, tools=None, generation_prompt=True):
            good = super().render(messages, tools, generation_prompt)
            return Rendered(good.token_ids, good.slots, good.spans[:-1], good.trained)

        def bridge(self, prompt_ids, completion_ids, new_messages, tools=None):
            end = len(prompt_ids) + len(completion_ids)
            return Bridged([NEWLINE, PAD], [Slot(end + 1, 1, item(picture(0)))], [Span(end, end)])

    with pytest.raises(Misaligned, match="bug in the renderer"):
        Trace(id="t").extend(ROOT, [user("hi")], Broken())
    trace = Trace(id="t")
    leaf = talk(trace, ([user("hi")], "yes"))
    with pytest.raises(Misaligned, match="bug in the renderer"):
        trace.extend(leaf, [user("hi")], Broken())


def test_inconsistent_nodes_cannot_be_created() -> None:
    ids = int32_array([1, 2, 3])
    slot = Slot(1, 2, item(picture(0)))
    with pytest.raises(Misaligned, match="0 logprobs"):
        Node(0, ROOT, user("a"), ids, 1, finish_reason="stop")
    with pytest.raises(Misaligned, match="both or neither"):
        Node(0, ROOT, user("a"), ids, 3, finish_reason="stop")
    with pytest.raises(Misaligned, match="after 3"):
        Node(0, ROOT, user("a"), ids, 3, slots=(slot, slot))
    with pytest.raises(Misaligned, match="covers 2 to 4, after 0, of 3"):
        Node(0, ROOT, user("a"), ids, 3, slots=(Slot(2, 2, slot.item),))
    logprobs, versions = float32_array([-1.0]), (PolicySpan(0, 1, version=0, epoch=0),)
    with pytest.raises(Misaligned, match="covers 1 to 3, after 0, of 2"):  # a sampled image
        Node(0, ROOT, user("a"), ids, 2, logprobs, versions, slots=(slot,), finish_reason="stop")


def test_misaligned_trace_is_refused() -> None:
    node = Node(0, ROOT, user("a"), int32_array([1]), 1)
    with pytest.raises(Misaligned, match="node 0 has parent -1 and place 1"):
        Trace(id="t", nodes=[node, node])
    with pytest.raises(Misaligned, match="toolset 0 of 0"):
        Trace(id="t", nodes=[Node(0, ROOT, user("a"), int32_array([1]), 1, tools=0)])
    trace = Trace(id="t")
    talk(trace, ([user("hi")], "yes"))
    trace.per_turn = [1.0, 2.0]
    with pytest.raises(Misaligned, match="2 per_turn credits for 1 turns"):
        encode_trace(trace)
