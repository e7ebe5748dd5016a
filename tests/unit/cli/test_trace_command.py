"""`sightline trace`: the printed form of a trace file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from sightline.cli.main import main
from sightline.families import load_renderer
from sightline.media import MediaStore
from sightline.message import user
from sightline.trace import PolicySpan, Trace, write_traces
from tests.unit.trace.test_codec import example


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "traces" / "step_00000001.msgpack"
    path.parent.mkdir(parents=True)
    write_traces(path, [example("first"), example("second")])
    return path


def tell(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["trace", *map(str, words)]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def test_several_traces_are_listed_and_a_single_one_is_shown(file: Path, capsys) -> None:
    listed = tell(capsys, "show", file)
    assert "   1  second  toy task 3  4 turns" in listed and "2 traces; --trace ID" in listed
    by_id = tell(capsys, "show", file, "--trace", "second")
    assert by_id == tell(capsys, "show", file, "--trace", "1")
    for line in (
        "4 turns in 3 branches",
        "reward 0.500, letters 0.500, exact 0.000, truncated",
        "forks: ",
        "error: gave up",
        "error: messages[0].role: 'robot'",
        "--- branch 1 of 3, from the beginning",
        "--- branch 2 of 3, continues node 1",
        "   2  assistant  (prompt ",
        ", 3 sampled, stop, version 4, credit +0.500)",
        "[image ",
        "-> look({})",
    ):
        assert line in by_id
    assert by_id.count("be brief") == 1, "what branches share is shown once"
    assert max(map(len, by_id.splitlines())) <= 80


def test_missing_trace_is_refused(file: Path, tmp_path: Path, capsys) -> None:
    assert "has no trace '7'" in tell(capsys, "show", file, "--trace", "7", code=2)
    folder = tell(capsys, "show", file.parents[1], code=2)
    assert "is a folder" in folder and "step_00000001.msgpack" in folder
    assert "No such file" in tell(capsys, "show", tmp_path / "none", code=2)


def test_export_writes_messages_with_references(tmp_path: Path, tiny_model: Path, capsys) -> None:
    file, store = tmp_path / "run" / "traces" / "t", MediaStore(tmp_path / "run" / "media")
    file.parent.mkdir(parents=True)
    trace = Trace(id="seen", reward=1.0)
    renderer = load_renderer(tiny_model, store)
    ref = store.put(Image.new("RGB", (32, 32)))
    turn = trace.extend(-1, [user("look: ", ref)], renderer)
    completion = renderer.stop_token_ids[:1]
    first = turn.commit(completion, [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop")
    for words in ("a", "b"):
        turn = trace.extend(first.id, [user(words)], renderer)
        turn.commit(completion, [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop")
    write_traces(file, [trace])

    lines = [json.loads(line) for line in tell(capsys, "export", file).splitlines()]
    assert [line["branch"] for line in lines] == [0, 1]
    assert [[n["id"] for n in line["nodes"]] for line in lines] == [[0, 1, 2, 3], [0, 1, 4, 5]]
    content = lines[0]["messages"][0]["content"]
    assert content[1] == {"type": "image_url", "image_url": {"url": ref.url}}
    # An export can be sent again, because the messages are equivalent.
    sent = renderer.read_conversation(lines[1]["messages"])
    assert sent == [trace.nodes[n].message for n in (0, 1, 4, 5)]

    out, images = tmp_path / "out.jsonl", tmp_path / "images"
    tell(capsys, "export", file, "--output", out, "--images", images)
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    (copied,) = images.iterdir()
    assert copied.name == lines[0]["images"][ref.digest] == f"{ref.digest}.png"
    assert copied.read_bytes() == store.get(ref)
    assert b"base64" not in out.read_bytes()


def changed(trace: Trace, node: int, **changes: object) -> Trace:
    nodes = list(trace.nodes)
    nodes[node] = msgspec.structs.replace(nodes[node], **changes)
    return msgspec.structs.replace(trace, nodes=nodes)


def test_diff_names_the_first_difference(file: Path, tmp_path: Path, capsys) -> None:
    assert "2 traces, no difference" in tell(capsys, "diff", file, file)
    other = tmp_path / "other"

    def against(*traces: Trace) -> str:
        write_traces(other, traces)
        return tell(capsys, "diff", file, other, code=1)

    one = example("renamed")
    assert "has 2 traces, " in against(one)
    ids = one.nodes[4].token_ids.numpy().copy()
    ids[2] += 1
    output = against(one, changed(one, 4, token_ids=msgspec.structs.replace(
        one.nodes[4].token_ids, data=ids.tobytes())))  # fmt: skip
    assert "trace 1 (second, renamed): nodes[4].token_ids[2]" in output
    assert f": {ids[2] - 1}\n" in output and f": {ids[2]}\n" in output
    output = against(changed(one, 0, message=user("else")), one)
    assert "trace 0 (first, renamed): nodes[0].message.role" in output
    logprobs = one.nodes[2].logprobs
    moved = msgspec.structs.replace(logprobs, data=(logprobs.numpy() * 2).tobytes())
    assert "nodes[2].logprobs[0]" in against(changed(one, 2, logprobs=moved), one)
    assert "reward" in against(msgspec.structs.replace(one, reward=0.25), one)
    shorter = msgspec.structs.replace(one, nodes=one.nodes[:3], per_turn=None)
    assert "nodes[3]\n" in against(shorter, one) and ": None" in against(shorter, one)


def test_replay_without_a_server_renders_the_trace(
    tmp_path: Path, tiny_model: Path, store: MediaStore, capsys
) -> None:
    renderer = load_renderer(tiny_model, store)
    trace = Trace(id="r", reward=1.0)
    completion = list(renderer.stop_token_ids[:1])
    turn = trace.extend(-1, [user("hi ", store.put(Image.new("RGB", (64, 64))))], renderer)
    first = turn.commit(completion, [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop")
    trace.extend(first.id, [user("on")], renderer).commit(
        completion, [-1.0], [PolicySpan(0, 1, version=0, epoch=0)], "stop"
    )
    path = tmp_path / "t"
    write_traces(path, [trace])
    where = ("--model", tiny_model, "--media", store.root)
    output = tell(capsys, "replay", path, *where)
    assert "2 turns rendered again (1 bridged, 1 whole), 0 differences" in output
    write_traces(path, [changed(trace, 1, message=user("else"))])
    output = tell(capsys, "replay", path, *where, code=1)
    assert "trace r node 1: message differ" in output
    assert "pass the checkpoint with --model" in tell(capsys, "replay", path, code=2)
