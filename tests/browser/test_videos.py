"""A rollout with videos: a file plays, and timed images play in sequence."""

from __future__ import annotations

from pathlib import Path

import msgspec
from PIL import Image
from playwright.sync_api import Page, expect
from synthetic_run import SyntheticSize, write_synthetic_run
from videos import encode_video, noise_frames

from sightline.media import MediaStore
from sightline.message import VideoPart, user, video
from sightline.trace import read_traces, write_traces
from sightline.trace.node import int32_array
from sightline.wire import MediaItem, Slot, VideoStep
from tests.browser.conftest import Serve


def show_videos(path: Path) -> tuple[VideoPart, VideoPart]:
    """Puts two videos into the first message of the run's first rollout."""
    run = write_synthetic_run(path, SyntheticSize(steps=1, rollouts_per_step=8, images=4))
    store = MediaStore(run.media)
    file = video(store.put(encode_video(noise_frames(8, 64, 48), "webm")))
    colours = [store.put(Image.new("RGB", (32, 32), c)) for c in ("red", "lime", "blue", "white")]
    listed = video([(ref, 0.5 * i) for i, ref in enumerate(colours)])
    slots, at = [], 1
    for part in (file, listed):
        for number in range(2):
            pair = (2 * number, 2 * number + 1)
            where = {"frames": pair} if part.ref else {"further": (part.refs[pair[1]],)}
            step = VideoStep(number=number, num_frames=4, seconds=1.0, **where)
            ref = part.ref or part.refs[pair[0]]
            slots.append(Slot(at, 4, MediaItem(ref, "synthetic", (1, 4, 4), "f", step=step)))
            at += 4
    traces = list(read_traces(run.traces_of(1)))
    ids = [1, *[0] * 16, 2, 3]
    node = msgspec.structs.replace(
        traces[0].nodes[0],
        message=user(file, listed, "what is it?"),
        token_ids=int32_array(ids),
        sampled_start=len(ids),
        slots=tuple(slots),
    )
    traces[0].nodes[0] = node
    write_traces(run.traces_of(1), traces)
    return file, listed


def test_video_file_plays_and_frame_list_advances(page: Page, serve: Serve, tmp_path: Path) -> None:
    file, listed = show_videos(tmp_path / "shop-001")
    assert file.ref is not None
    address = serve(tmp_path / "shop-001")
    page.goto(f"{address}/rollout?run=shop-001&file=step_000001.msgpack&number=0")
    film = page.locator(".film video")
    expect(film).to_have_count(1)
    assert film.evaluate("film => film.play().then(() => [film.videoWidth, film.videoHeight])") == [
        64,
        48,
    ]
    expect(page.locator(".film figcaption").first).to_contain_text("8 frames, 4.0 per second")
    expect(page.locator(".film figcaption").nth(1)).to_contain_text("2 steps of 8 tokens")
    frames = page.locator(".film .frame img")
    expect(frames).to_have_attribute("src", f"/media/shop-001/{listed.refs[0].digest}")
    page.locator(".film .player input").fill("2")
    expect(frames).to_have_attribute("src", f"/media/shop-001/{listed.refs[2].digest}")
    page.locator(".film .player button").click()
    expect(frames).to_have_attribute("src", f"/media/shop-001/{listed.refs[3].digest}")
    page.goto(f"{address}/image?run=shop-001&digest={file.ref.digest}")
    expect(page.locator(".one-image video")).to_be_visible()
