"""A run exported into one HTML file, opened from disk."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from sightline.cli.main import main
from sightline.view.dashboard.export import MAX_BYTES, MAX_ROLLOUTS
from tests.browser.test_broken import hostile  # noqa: F401


def open_export(page: Page, run: Path, file: Path) -> str:
    assert main(["view", str(run), "--export", str(file)]) == 0
    assert file.stat().st_size <= MAX_BYTES
    page.goto(file.as_uri())
    return file.as_uri()


def test_an_exported_run_opens_from_disk(page: Page, small_run: Path, tmp_path: Path) -> None:
    address = open_export(page, small_run, tmp_path / "run.html")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    expect(page.locator("h1")).to_have_text("shop-001")
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.keyboard.press("2")
    expect(page.locator("h1")).to_have_text("Rollouts")
    rows = page.locator("table.rollouts tbody tr")
    assert 0 < rows.count() <= MAX_ROLLOUTS
    steps = {row.split("\t")[2] for row in rows.all_inner_texts()}
    assert steps == {"1", "6"}
    name = rows.first.locator("a").inner_text()
    rows.first.locator("a").click()
    expect(page.locator("h1")).to_contain_text(name)
    assert page.locator(".picture img").first.evaluate(
        "image => image.decode().then(() => image.naturalWidth)"
    )
    expect(page.locator(".token.sampled").first).to_be_visible()
    page.locator(".token.sampled").first.hover()
    expect(page.locator(".detail").first).to_contain_text("probability")
    # The address contains the whole state: a reload shows the same rollout.
    page.reload()
    expect(page.locator("h1")).to_contain_text(name)
    page.keyboard.press("n")
    expect(page.locator("h1")).not_to_contain_text(name)
    page.keyboard.press("3")
    expect(page.locator(".dimension")).to_have_count(6)
    page.keyboard.press("4")
    page.locator(".gallery a").first.click()
    expect(page.locator(".one-image img")).to_be_visible()
    page.keyboard.press("5")
    expect(page.locator("table.settings")).to_contain_text("lr")
    page.go_back()
    expect(page.locator("h1")).to_contain_text("Image")
    assert [url for url in requests if not url.startswith((address, "data:"))] == []


def test_exported_hostile_run_executes_no_script(
    page: Page,
    hostile: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    address = open_export(page, hostile, tmp_path / "run.html")
    for place in ("", "rollouts", "rollout?file=step_000001.msgpack&number=0", "settings"):
        page.goto("about:blank")
        page.goto(f"{address}#/{place}")
        expect(page.locator("h1")).to_be_visible()
        page.wait_for_timeout(300)
        assert page.evaluate("window.harmed") is None, place
        assert page.locator("main svg[onload], main script, main a[href^=javascript]").count() == 0
    page.goto(f"{address}#/rollout?file=step_000001.msgpack&number=0")
    expect(page.locator("article .text").first).to_contain_text(re.compile("<script>"))
