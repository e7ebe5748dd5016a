"""Damaged run directories, and rollouts with malicious content."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from sightline.media import MediaRef, MediaStore
from sightline.message import ImagePart, Message, TextPart, ToolCall
from sightline.run import EventLog, RunDir
from sightline.trace import Node, PolicySpan, Trace, read_traces, write_traces
from sightline.trace.node import float32_array, int32_array
from sightline.wire import MediaItem, Slot
from tests.browser.conftest import Serve

HARM = (
    '<script>window.harmed=1</script>"\'><img src=x onerror="window.harmed=1">'
    '<svg onload=window.harmed=1></svg><a href="javascript:window.harmed=1">x</a>'
    "{{constructor.constructor('window.harmed=1')()}}</textarea></title>\u202e"
)
SVG = (
    b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.harmed=1'>"
    b"<script>window.harmed=1</script></svg>"
)


def test_damaged_run_opens_and_names_missing_files(
    page: Page, serve: Serve, small_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged-001"
    shutil.copytree(small_run, path)
    run_dir = RunDir(path)
    run_dir.traces_of(3).write_bytes(run_dir.traces_of(3).read_bytes()[:-100])
    (run_dir.traces / "step_000099.msgpack").write_bytes(b"PK\x03\x04 a zip")
    (run_dir.path / "holiday.jpg").write_bytes(b"\xff\xd8")
    with open(run_dir.metrics, "ab") as file:
        file.write(b'not json at all\n{"time": 1')
    first = next(read_traces(run_dir.traces_of(6)))
    ref = first.nodes[0].slots[0].item.ref
    MediaStore(run_dir.media).path(ref.digest).unlink()
    run_dir.scores_of(2).write_bytes(b"")
    address = serve(path)
    page.goto(f"{address}/")
    problems = page.locator(".problems")
    for problem in (
        "traces/step_000003.msgpack: ends inside trace 39",
        "traces/step_000099.msgpack: not a trace file",
        "metrics.jsonl: skipped 1 lines that are not events",
        "scores of step 2",
        "1 images are in no store",
    ):
        expect(problems).to_contain_text(problem)
    page.goto(f"{address}/rollouts")
    expect(page.locator(".pager").first).to_contain_text("239 rollouts")
    page.goto(f"{address}/rollout?run=damaged-001&file=step_000006.msgpack&number=0")
    expect(page.locator(".picture .missing").first).to_contain_text(ref.digest[:16])
    page.goto(f"{address}/images?digest={ref.digest[:20]}")
    expect(page.locator(".gallery .missing")).to_have_count(1)


def test_empty_folder_and_config_only_folder_open(page: Page, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "young-001"
    path.mkdir()
    (path / "config.toml").write_text("[run\nname = ")
    address = serve(path)
    for name in ("", "rollouts", "mismatch", "images", "processes", "settings"):
        page.goto(f"{address}/{name}")
        expect(page.locator("h1")).to_be_visible()
    page.goto(f"{address}/")
    expect(page.locator(".problems")).to_contain_text("config.toml is missing, empty or unreadable")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    name = "<img src=x onerror=window.harmed=1>"
    run_dir = RunDir(tmp_path / name)
    run_dir.make()
    run_dir.config.write_text(f"[env]\nname = {msgspec.json.encode(HARM).decode()}\n")
    store = MediaStore(run_dir.media)
    good = store.put(Image.new("RGB", (64, 64), "red"))
    digest = hashlib.sha256(SVG).hexdigest()
    posing = MediaRef(digest, "image/png", 64, 64, len(SVG))
    store.path(digest).parent.mkdir(parents=True, exist_ok=True)
    store.path(digest).write_bytes(SVG)
    item = [
        MediaItem(ref=r, family="tiny", grid=(1, 2, 2), fingerprint=HARM) for r in (good, posing)
    ]
    node = Node(
        id=0,
        parent=-1,
        message=Message(
            role="user", content=(ImagePart(good), TextPart(HARM), ImagePart(posing)),
        ),
        token_ids=int32_array([1, 2, 3, 4]),
        sampled_start=4,
        slots=(Slot(0, 1, item[0], HARM), Slot(2, 1, item[1])),
    )  # fmt: skip
    answer = Node(
        id=1,
        parent=0,
        message=Message(
            role="assistant",
            content=(TextPart(HARM),),
            reasoning=HARM,
            tool_calls=(ToolCall(name=HARM, arguments=HARM),),
        ),
        token_ids=int32_array([5, 6]),
        sampled_start=0,
        logprobs=float32_array([-0.1, -0.2]),
        versions=(PolicySpan(0, 2, version=0, epoch=0),),
        finish_reason=HARM,
    )
    write_traces(
        run_dir.traces_of(1),
        [
            Trace(
                id=HARM, group_id=HARM, env=HARM, nodes=[node, answer], reward=1.0,
                rewards={HARM: 1.0}, error=HARM, error_kind=HARM, refused_requests=[HARM],
                toolsets=[HARM], forks={HARM: 1},
            )
        ],
    )  # fmt: skip
    events = EventLog(run_dir.metrics, HARM)
    events.write("step", 1, reward=1.0, steps_total=1, parts={HARM: 1.0}, verdicts={HARM: 1})
    events.write("dropped", 1, reason=HARM, rollout_id=HARM, detail=HARM)
    (run_dir.logs / f"{HARM.replace('/', '')[:60]}.log").write_text(HARM * 10)
    return run_dir.path


def test_hostile_rollout_executes_no_script(page: Page, serve: Serve, hostile: Path) -> None:
    address = serve(hostile)
    page.goto(f"{address}/")
    expect(page.locator("h1")).to_have_text(hostile.name)
    for place in (
        "", "rollouts", "rollout?file=step_000001.msgpack&number=0", "mismatch", "images",
        "processes", "settings", "rollouts?text=%3Cscript%3Ewindow.harmed%3D1%3C%2Fscript%3E",
    ):  # fmt: skip
        page.goto(f"{address}/{place}")
        expect(page.locator("h1")).to_be_visible()
        page.wait_for_timeout(400)
        assert page.evaluate("window.harmed") is None, place
        # No text was rendered as an element.
        assert page.locator("main svg[onload], main script, main a[href^=javascript]").count() == 0
    page.goto(f"{address}/rollout?file=step_000001.msgpack&number=0")
    expect(page.locator("article .text").first).to_contain_text("<script>window.harmed=1</script>")
    expect(page.locator(".picture .missing")).to_have_count(1)
    # In its own tab, the image is not rendered as a page either.
    digest = hashlib.sha256(SVG).hexdigest()
    key = page.evaluate("encodeURIComponent(document.querySelector('.runs b').textContent)")
    answer = page.goto(f"{address}/media/{key}/{digest}")
    assert answer is not None and answer.status == 415
    assert page.evaluate("window.harmed") is None
