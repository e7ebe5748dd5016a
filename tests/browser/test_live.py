"""A live run updates without a reload, at the cost of the new data only."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect
from synthetic_run import SyntheticRun, SyntheticSize

from tests.browser.conftest import Serve

SIZE = SyntheticSize(steps=30, rollouts_per_step=20, images=8, conversations=12)


def test_a_live_run_updates_without_a_reload(page: Page, serve: Serve, tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "live-001", SIZE)
    run.write_step()
    run.write_step()
    address = serve(tmp_path)
    page.goto(f"{address}/rollouts")
    page.evaluate("window.untouched = true")
    expect(page.locator(".pager").first).to_contain_text("40 rollouts")
    expect(page.locator(".state").first).to_contain_text("running")
    run.write_step()
    expect(page.locator(".pager").first).to_contain_text("60 rollouts")
    expect(page.locator("tbody tr").first).to_contain_text("3")
    page.keyboard.press("1")
    step = page.locator(".fact", has_text="step").locator("dd").first
    expect(step).to_contain_text("3")
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    run.write_step()
    expect(step).to_contain_text("4")
    expect(page.locator(".runs")).to_contain_text("4/30")
    # Only the new rows were requested.
    assert any("cursor=6" in url for url in urls)
    assert not any(url.endswith(("cursor=0", ".js", ".css")) for url in urls)
    # The page also shows its end, although no event reports it.
    run.run_dir.summary.write_text('{"steps": 4}')
    expect(page.locator(".runs .state").first).to_contain_text("finished")
    assert page.evaluate("window.untouched") is True


def test_responses_slower_than_a_step_are_still_shown(
    page: Page, serve: Serve, tmp_path: Path
) -> None:
    run = SyntheticRun(tmp_path / "live-001", SIZE)
    run.write_step()
    address = serve(tmp_path)
    page.add_init_script(
        """const fetchNow = window.fetch;
        window.fetch = async (...request) => {
            await new Promise((resolve) => setTimeout(resolve, 3000));
            return fetchNow(...request);
        };"""
    )
    page.goto(f"{address}/")
    for _ in range(20):
        run.write_step()
        page.wait_for_timeout(600)
        if page.locator(".chart canvas").count():
            break
    expect(page.locator(".chart canvas").first).to_be_visible(timeout=100)
    # Events that arrived in the meantime are fetched too.
    step = page.locator(".fact", has_text="step").locator("dd").first
    expect(step).to_contain_text(str(run.steps))


def test_page_detects_server_exit_and_reconnects(page: Page, serve: Serve, tmp_path: Path) -> None:
    SyntheticRun(tmp_path / "first-001", SIZE).write_step()
    address = serve(tmp_path)
    page.goto(f"{address}/")
    expect(page.locator("footer .on")).to_have_text("connected")
    serve.end(address)
    expect(page.locator("footer .off")).to_have_text("disconnected")
    serve(tmp_path, options=("--port", address.rsplit(":", 1)[1]))
    expect(page.locator("footer .on")).to_have_text("connected")
