"""Take the screenshots of docs/screens: `make screenshots DEMO=runs/color_codeword-001`.

They show a run of the demo, a synthetic run of 100,000 rollouts in build/, and a small run that
fails.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

import msgspec
from chromium import get_chromium
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from synthetic_run import START_TIME, SyntheticRun, SyntheticSize

from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.dashboard.run_view import RunView
from sightline.wire.event import Event
from sightline.wire.file import append_line

SIZE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
FAILED = "shop_failed-001"
PROBLEM = """server ended with 1: Traceback (most recent call last):
  File "inference/torch_engine/engine.py", line 120, in step
OutOfMemoryError: 2.1 GB were asked for, and 1.4 GB are free"""
FOLDER = Path(__file__).parent / "screens"
MOST_BYTES = 150_000
SETTLED = """() => !document.querySelector(".loading, .stale") && [...document.images].every(
    (image) => image.complete || image.getBoundingClientRect().top > innerHeight)"""
"""True when everything visible is loaded."""


def shots(demo: str, many: str, image: str) -> dict[str, tuple[str, str]]:
    """Return theme and address of each screenshot. `image` is the digest of one in the demo."""
    return {
        "overview": ("light", f"/?runs={demo}&smooth=5"),
        "overview_phone": ("light", f"/?runs={demo}&smooth=5"),
        "failed": ("light", f"/?runs={FAILED}"),
        "failed_phone": ("dark", f"/?runs={FAILED}"),
        "overview_dark": ("dark", f"/?runs={demo},{many}&smooth=5"),
        "rollouts": ("light", f"/rollouts?run={demo}"),
        "groups": ("light", f"/rollouts?run={demo}&fold=1&step_from=20&step_to=20"),
        "rollouts_100k": ("light", f"/rollouts?run={many}&page=1000"),
        "rollout": ("light", f"/rollout?run={demo}&file=step_000005.msgpack&number=3"),
        "rollout_dark": (
            "dark",
            f"/rollout?run={many}&file=step_000200.msgpack&number=6&colour=kl",
        ),
        "mismatch": ("light", f"/mismatch?run={demo}"),
        "mismatch_100k": ("light", f"/mismatch?run={many}"),
        "images": ("light", f"/images?run={demo}"),
        "image": ("light", f"/image?run={demo}&digest={image}"),
        "images_100k": ("dark", f"/images?run={many}"),
        "processes": ("light", f"/processes?run={demo}"),
        "settings": ("light", f"/settings?runs={demo}"),
    }


def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    small = picture.quantize(200, dither=Image.Dither.NONE)
    small.save(FOLDER / f"{name}.png", optimize=True)
    size = (FOLDER / f"{name}.png").stat().st_size
    assert size < MOST_BYTES, f"{name}.png has {size} bytes"
    print(f"{name}.png {size:,} bytes")


def write_failed_run(path: Path) -> None:
    size = SyntheticSize(steps=40, rollouts_per_step=100, images=24, conversations=60)
    run = SyntheticRun(path, size)
    while run.steps < 24:
        run.write_step()
    run.run_dir.notes.write_text("#sweep #lr=1e-6\nThe third of the sweep over learning rates.\n")
    end_run(
        run, outcome="failed", problem=PROBLEM, fix="lower [inference] max_num_seqs, and resume"
    )


def write_many(path: Path) -> None:
    run = SyntheticRun(path)
    while run.steps < run.size.steps:
        run.write_step()
    end_run(run, outcome="finished", problem="", fix="")


def end_run(run: SyntheticRun, **values: str) -> None:
    time = START_TIME + 20 * run.steps + 5
    event = Event(time=time, process="launcher", kind="end", step=0, values=values)
    append_line(run.run_dir.metrics, msgspec.json.encode(event))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="a run of `make demo`")
    parser.add_argument("many", type=Path, help="where the synthetic run is, or will be")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if not args.many.is_dir():
        write_many(args.many)
    failed = args.many.parent / FAILED
    if not failed.is_dir():
        write_failed_run(failed)
    RunView("many", RunDir(args.many)).refresh_all()
    trace = next(read_traces(RunDir(args.demo).traces_of(1)))
    image = next(slot.item.ref.digest for node in trace.nodes for slot in node.slots)
    paths = [str(path) for path in (args.demo, args.many, failed)]
    command = [sys.executable, "-m", "sightline", "view", *paths]
    with (
        subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip().rstrip("/")
            browser = playwright.chromium.launch(
                executable_path=get_chromium(), args=["--no-sandbox"]
            )
            for name, (theme, path) in shots(args.demo.name, args.many.name, image).items():
                size = PHONE if name.endswith("_phone") else SIZE
                page = browser.new_page(viewport=size, color_scheme=theme)  # type: ignore[arg-type]
                page.set_default_timeout(120_000)
                page.goto(address + path)
                page.locator("main h1").wait_for()
                page.wait_for_function(SETTLED)
                page.wait_for_timeout(1500)
                save(page, name)
                page.close()
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
