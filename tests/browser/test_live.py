"""A run that goes on shows without a reload, and at the cost of what is new."""

from __future__ import annotations

import random
from pathlib import Path

from playwright.sync_api import Page, expect

from sightline.bench.harness import synthetic_run as synthetic
from sightline.bench.harness.synthetic_run import SyntheticSize
from sightline.media import MediaStore
from sightline.run import RunDir
from tests.browser.conftest import Serve

SIZE = SyntheticSize(steps=30, rollouts_per_step=20, images=8, conversations=12)


class Growing:
    """A synthetic run, a step at a time."""

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self.run_dir.make()
        self.rng = random.Random(0)
        synthetic._write_config(self.run_dir, SIZE)
        store = MediaStore(self.run_dir.media)
        refs = [store.put(synthetic._draw_image(self.rng, i)) for i in range(SIZE.images)]
        self.talks = [synthetic._build_conversation(self.rng, refs) for _ in range(12)]
        self.totals: dict[str, int] = {}
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        synthetic._write_step(self.run_dir, self.steps, SIZE, self.talks, self.rng, self.totals)


def test_a_live_run_updates_without_a_reload(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = Growing(tmp_path / "live-001")
    run.step()
    run.step()
    address = serve(tmp_path)
    page.goto(f"{address}/rollouts")
    page.evaluate("window.untouched = true")
    expect(page.locator(".pager").first).to_contain_text("40 rollouts")
    expect(page.locator(".state").first).to_contain_text("live")
    run.step()
    expect(page.locator(".pager").first).to_contain_text("60 rollouts")
    expect(page.locator("tbody tr").first).to_contain_text("3")
    page.keyboard.press("1")
    step = page.locator(".fact", has_text="step").locator("dd").first
    expect(step).to_contain_text("3")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    run.step()
    expect(step).to_contain_text("4")
    expect(page.locator(".runs")).to_contain_text("4/30")
    # Only the rows that are new were asked for.
    assert any("cursor=6" in url for url in asked)
    assert not any(url.endswith(("cursor=0", ".js", ".css")) for url in asked)
    # Its end shows too, although no event tells of it.
    run.run_dir.summary.write_text('{"steps": 4}')
    expect(page.locator(".runs .state").first).to_contain_text("finished")
    assert page.evaluate("window.untouched") is True


def test_a_rollout_that_is_yet_to_be_read_shows_when_it_is(
    page: Page, serve: Serve, tmp_path: Path
) -> None:
    run = Growing(tmp_path / "live-001")
    run.step()
    address = serve(tmp_path)
    page.goto(f"{address}/rollout?run=live-001&file=step_000002.msgpack&number=3")
    expect(page.locator("main")).to_contain_text("there is no such rollout")
    run.step()
    expect(page.locator("main h1")).to_be_visible()


def test_a_run_that_appears_shows(page: Page, serve: Serve, tmp_path: Path) -> None:
    Growing(tmp_path / "first-001").step()
    address = serve(tmp_path)
    page.goto(f"{address}/")
    expect(page.locator(".runs li")).to_have_count(1)
    Growing(tmp_path / "second-001").step()
    expect(page.locator(".runs li")).to_have_count(2)


def test_a_server_that_ends_is_noticed_and_found_again(
    page: Page, serve: Serve, tmp_path: Path
) -> None:
    Growing(tmp_path / "first-001").step()
    address = serve(tmp_path)
    page.goto(f"{address}/")
    expect(page.locator("footer .on")).to_have_text("up to date")
    serve.end(address)
    expect(page.locator("footer .off")).to_have_text("no connection")
    serve(tmp_path, options=("--port", address.rsplit(":", 1)[1]))
    expect(page.locator("footer .on")).to_have_text("up to date")
