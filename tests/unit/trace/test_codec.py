"""Traces as bytes and files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import example as with_example
from hypothesis import given
from hypothesis import strategies as st

from sightline.errors import WireError
from sightline.message import ToolCall, assistant, system, user
from sightline.trace import Trace, decode_trace, encode_trace, read_traces, write_traces
from sightline.trace.codec import TraceRecord, read_records
from sightline.trace.node import ROOT
from tests.unit.trace.toy import TOOL, ToyRenderer, picture, say, talk

GOLDEN = Path(__file__).parents[2] / "golden" / "trace_v1.traces"


def example(name: str = "golden") -> Trace:
    """A trace that uses every field: forks, images, tools, a cut-off turn and all outcomes."""
    trace = Trace(id=name, group_id="group", env="toy", task=3, split="eval", seed=7)
    toy = ToyRenderer()
    opening = [system("be brief"), user("what is ", picture(1), picture(2), "?")]
    first = say(trace.extend(ROOT, opening, toy, TOOL), "ab", version=4)
    say(trace.extend(first.id, [user("and ", picture(1))], toy, TOOL), "c", False, version=5)
    say(trace.extend(first.id, [user("?")], toy, TOOL), "d", version=5)
    call = msgspec.structs.replace(assistant(""), tool_calls=(ToolCall("look", "{}", "1"),))
    say(trace.prepare([user("hi"), call, user("go")], toy), "e", version=6)
    trace.reward, trace.rewards = 0.5, {"letters": 0.5, "exact": 0.0}
    trace.per_turn = [0.5, 0.0, 0.25, 0.0]
    trace.temperature, trace.truncated = 0.75, True
    trace.error, trace.refused_requests = "gave up", ["messages[0].role: 'robot'"]
    trace.started, trace.ended = 100.0, 101.5
    return trace


def test_trace_round_trips_through_the_codec() -> None:
    trace = example()
    back = decode_trace(encode_trace(trace))
    assert back == trace
    assert back.branches() == trace.branches()
    assert encode_trace(back) == encode_trace(trace)


def test_decoded_trace_continues_like_the_original() -> None:
    trace = Trace(id="t")
    leaf = talk(trace, ([user(picture(1))], "ab"), ([user(picture(2))], "b"))
    back = decode_trace(encode_trace(trace))
    for each in (trace, back):
        talk(each, ([user("on")], "c"), leaf=leaf)
    assert back == trace


def test_the_golden_file_of_schema_1_is_read() -> None:
    assert list(read_traces(GOLDEN)) == [example("golden"), Trace(id="empty")]


def test_a_file_holds_traces_in_order(tmp_path: Path) -> None:
    path = tmp_path / "step_1.traces"
    traces = [example("a"), Trace(id="b"), example("c")]
    write_traces(path, traces)
    assert list(read_traces(path)) == traces
    assert list(tmp_path.iterdir()) == [path]
    write_traces(path, [])
    assert list(read_traces(path)) == []


def test_failed_trace_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "step_1.traces"
    write_traces(path, [example("a")])
    broken = example("b")
    broken.per_turn = [1.0]
    with pytest.raises(ValueError, match="per_turn"):
        write_traces(path, [example("a"), broken])
    assert list(read_traces(path)) == [example("a")]
    assert list(tmp_path.iterdir()) == [path]


def changed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode_trace(example())) | fields)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "data is not a trace"),
        (b"\x00\xffgarbage", "data is not a trace"),
        (msgspec.msgpack.encode([1, 2]), "data is not a trace"),
        (msgspec.msgpack.encode({"nodes": []}), "missing required field `schema`"),
        (msgspec.msgpack.encode({"schema": 2}), "schema 2. This sightline reads 1 to 1"),
        (msgspec.msgpack.encode({"schema": 1}), "missing required field `id`"),
        (changed(pixel_values=[0.5]), "unknown field `pixel_values`"),
        (changed(nodes=[{"id": 0}]), r"at `\$.nodes\[0\]`"),
        (changed(per_turn=[1.0]), "1 per_turn credits for 4 turns"),
    ],
)
def test_foreign_bytes_are_refused_with_a_message(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_trace(data)


def test_foreign_or_truncated_file_is_refused_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "step_1.traces"
    path.write_bytes(b"something else")
    with pytest.raises(WireError, match="not a trace file"):
        list(read_traces(path))
    write_traces(path, [example("a"), example("b")])
    whole = path.read_bytes()
    second = len(whole) - len(encode_trace(example("b"))) - 4
    for size in (second + 2, second + 4, second + 50, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(WireError, match="ends inside trace 1"):
            list(read_traces(path))


def test_a_damaged_trace_does_not_affect_the_others(tmp_path: Path) -> None:
    path, names = tmp_path / "step_1.traces", ("a", "b", "c")
    write_traces(path, map(example, names))
    data = bytearray(path.read_bytes())
    data[data.index(encode_trace(example("b")))] = 0xC1
    path.write_bytes(data)
    first, damaged, last = read_records(path)
    assert isinstance(first, TraceRecord) and isinstance(last, TraceRecord)
    assert (first.trace, first.number, last.trace, last.number) == (
        example("a"),
        0,
        example("c"),
        2,
    )
    assert isinstance(damaged, WireError) and "trace 1 is not a trace" in damaged.problem
    assert decode_trace(bytes(data[last.start : last.start + last.size])) == example("c")
    with pytest.raises(WireError, match=f"{path}: trace 1 is not a trace"):
        list(read_traces(path))


DEEP = b"\x91" * 200_000


@with_example(DEEP, b"\x81\xa1a").via("nested too deeply")
@with_example(DEEP, b"\x82\xa6schema\x01\xa5nodes").via("a trace, nested too deeply")
@with_example(b"\xa2\xff\xfe", b"\x82\xa6schema\x01\xa2id").via("a trace whose text is no UTF-8")
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x80", b"PK\x03\x04", b"{", b"["]))
def test_arbitrary_bytes_raise_only_a_refusal(data: bytes, head: bytes) -> None:
    with pytest.raises(WireError):
        decode_trace(head + data)
