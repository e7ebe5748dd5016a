"""How runs ended, their problems, and searches in the list of runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from sightline.run import EventLog, RunDir
from tests.browser.conftest import Serve


@pytest.fixture(scope="module")
def runs(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that failed before its first step, one that was stopped, one that collapsed."""
    folder = tmp_path_factory.mktemp("runs")
    failed = RunDir(folder / "failed-001")
    failed.make()
    failed.config.write_text('[run]\nsteps = 40\n[env]\nname = "shop"\n')
    events = EventLog(failed.metrics, "launcher")
    events.write("state", phase="starting")
    problem = "server ended with 1: broken\nTraceback (most recent call last):\n  x\nKeyError: 'a'"
    events.write("end", outcome="failed", problem=problem, fix="give the server a model")
    for name, outcome in (("stopped-001", "stopped"), ("collapsed-001", "finished")):
        shutil.copytree(small_run, folder / name)
        events = EventLog(RunDir(folder / name).metrics, "launcher")
        if outcome == "finished":
            for step in range(7, 40):
                reward, odd = (0.8 if step < 20 else 0.1), 17.5 + step
                events.write("step", step, reward=reward, steps_total=40, never_heard_of=odd)
        events.write("end", outcome=outcome, problem="a signal" * (outcome == "stopped"), fix="")
    RunDir(folder / "collapsed-001").notes.write_text("#sweep the learning rate was too high")
    return folder


@pytest.fixture(scope="module")
def address(serve: Serve, runs: Path) -> str:
    return serve(runs)


def test_failure_shows_its_cause_and_a_stop_signal_is_no_failure(page: Page, address: str) -> None:
    page.goto(f"{address}/?run=failed-001")
    end = page.locator(".end")
    expect(end).to_contain_text("This run failed")
    expect(end).to_contain_text("server ended with 1: broken: KeyError: 'a'")
    expect(end).to_contain_text("give the server a model")
    expect(page.locator(".fact", has_text="step").first).to_contain_text("0of 40")
    expect(page.locator("main .empty")).to_contain_text("failed before its first step finished")
    line = page.locator(".runs li", has_text="failed-001")
    expect(line.locator(".s-failed")).to_have_text("failed")
    expect(line.locator(".cause")).to_contain_text("KeyError: 'a'")
    page.goto(f"{address}/?run=stopped-001")
    expect(page.locator(".end")).to_contain_text("Stopped by a signal")
    expect(page.locator(".end")).to_contain_text("--resume")
    assert page.locator("[role=alert]").count() == 0
    line = page.locator(".runs li", has_text="stopped-001")
    expect(line.locator(".s-stopped")).to_have_text("stopped")
    assert line.locator(".cause").count() == 0


def test_exceptions_link_to_their_rollouts(page: Page, address: str) -> None:
    page.goto(f"{address}/?run=stopped-001")
    row = page.locator(".exceptions tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("MediaMissing: no store root holds the image")
    num = row.locator("td").first.inner_text()
    row.locator("a").last.click()
    expect(page.locator("h1 .verdict, h1 + .verdict, header .verdict").first).to_have_text("broken")
    page.go_back()
    row.locator("a").first.click()
    expect(page.locator(".pager span").first).to_contain_text(f"{num} rollouts")


def test_collapse_raises_an_alert_and_a_new_metric_gets_a_chart(page: Page, address: str) -> None:
    page.goto(f"{address}/?run=collapsed-001")
    expect(page.locator(".alert")).to_contain_text("The reward fell to 0.1 from 0.8")
    expect(page.locator(".runs li", has_text="collapsed-001")).to_contain_text("⚠ collapses")
    assert page.locator(".chart h3", has_text="never heard of").count() == 0
    page.get_by_role("button", name="more chart").click()
    expect(page.locator(".chart h3", has_text="never heard of")).to_be_visible()


def test_runs_are_found_by_name_tag_and_state(page: Page, address: str) -> None:
    page.goto(f"{address}/?run=collapsed-001")
    expect(page.locator(".notes .tag")).to_have_text("sweep")
    search = page.get_by_label("search runs")
    for text, num_found in (
        ("sweep", 1),
        ("KeyError", 1),
        ("001 stopped", 1),
        ("001", 3),
        ("zzz", 0),
    ):
        search.fill(text)
        expect(page.locator(".runs li")).to_have_count(num_found)
    # The key for searching is that of the page, where it has a field of its own.
    page.goto(f"{address}/rollouts?run=stopped-001")
    expect(page.locator(".pager").first).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("text", exact=True)).to_be_focused()


def test_rollouts_collapse_by_group(page: Page, address: str) -> None:
    page.goto(f"{address}/rollouts?run=stopped-001")
    page.get_by_label("by group").check()
    expect(page.locator(".pager").first).to_contain_text("24 groups")
    first = page.locator("table.groups > tbody").first
    first.locator("button").click()
    expect(first.locator(".inside tbody tr")).to_have_count(10)
    first.locator(".inside a").first.click()
    expect(page.locator(".siblings")).to_be_visible()


def test_a_phone_shows_every_page_without_scrolling_sideways(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for place in ("", "rollouts", "rollouts?fold=1", "mismatch", "images", "processes", "settings",
                  "rollout?file=step_000006.msgpack&number=1"):  # fmt: skip
        page.goto(f"{address}/{place}{'&' if '?' in place else '?'}run=collapsed-001")
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
    expect(page.locator(".runs")).not_to_be_visible()
    page.locator(".unfold").click()
    expect(page.locator(".runs li")).to_have_count(3)
