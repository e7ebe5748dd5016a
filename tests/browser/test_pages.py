"""Every page shows the run's data. Links, keys, light and dark theme work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from playwright.sync_api import Page, expect

from sightline.run import RunDir
from sightline.trace import read_traces
from tests.browser.conftest import Serve


def test_overview_charts_every_metric_and_zooms(page: Page, small: str) -> None:
    page.goto(f"{small}/")
    expect(page.locator("h1")).to_have_text("shop-001")
    titles = page.locator(".chart h3")
    expect(titles.filter(has_text="Reward").first).to_be_visible()
    texts = titles.all_text_contents()
    for title in ("Reward", "Loss", "Mismatch KL", "Entropy", "Lag", "Throughput", "Verdicts",
                  "Failed images"):  # fmt: skip
        assert title in texts
    plot = page.locator(".u-over").first
    plot.hover()
    expect(page.locator(".chart").nth(2).locator(".legend .at")).to_contain_text("step")
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40, steps=8)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"zoom=\d+-\d+"))
    page.locator("input[type=range]").fill("5")
    expect(page).to_have_url(re.compile(r"smooth=5"))
    page.locator(".u-over").first.dblclick()
    expect(page).not_to_have_url(re.compile(r"zoom="))


def test_rollout_filters_are_kept_in_the_link(page: Page, small: str) -> None:
    page.goto(f"{small}/rollouts")
    expect(page.locator(".pager").first).to_contain_text("240 rollouts")
    assert page.locator("table.rollouts tbody tr").count() == 50
    page.get_by_label("verdict").select_option("no_signal")
    expect(page.locator("table.rollouts .verdict").first).to_have_text("no signal")
    page.get_by_label("step from").fill("2")
    page.get_by_label("step from").press("Enter")
    page.get_by_label("text", exact=True).fill("CLICK(")
    expect(page).to_have_url(re.compile("text=CLICK"))
    expect(page.locator("table.rollouts")).not_to_have_class(re.compile("stale"))
    text = page.locator(".pager span").first.inner_text()
    rows = page.locator("tbody tr").all_inner_texts()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".pager span").first).to_have_text(text)
    assert other.locator("tbody tr").all_inner_texts() == rows
    other.close()


def test_a_rollout_shows_its_images_graph_and_tokens(
    page: Page, small: str, small_run: Path
) -> None:
    run_dir = RunDir(small_run)
    traces = list(read_traces(run_dir.traces_of(6)))
    number = next(i for i, trace in enumerate(traces) if trace.forks and trace.reward is not None)
    trace = traces[number]
    page.goto(f"{small}/rollout?run=shop-001&file=step_000006.msgpack&number={number}")
    expect(page.locator("h1")).to_contain_text(trace.id)
    expect(page.locator(".graph .node")).to_have_count(len(trace.nodes))
    expect(page.locator(".graph .branches button")).to_have_count(2)
    first = page.locator(".picture img").first
    expect(first).to_be_visible()
    slot = trace.nodes[0].slots[0]
    ref = slot.item.ref
    assert first.evaluate(
        "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"
    ) == [ref.width, ref.height]
    # The cell under the mouse is the token of the same place.
    rows, columns = slot.item.grid[1] // 2, slot.item.grid[2] // 2
    box = page.locator(".cells").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 2.5 / columns, box["y"] + box["height"] * 1.5 / rows)
    expect(page.locator("figcaption .lit").first).to_have_text(
        f"token {columns + 3}: row 2, column 3"
    )
    turn = trace.turns[0]
    card = page.locator(f"#node-{turn.id}")
    expect(card.locator(".token.sampled")).to_have_count(turn.num_sampled)
    expect(card.locator(".token.context")).to_have_count(turn.sampled_start)
    card.locator(".token.sampled").nth(2).hover()
    detail = card.locator(".detail")
    for name in ("sampled", "probability", "sampler", "trainer", "ratio", "advantage", "version"):
        expect(detail).to_contain_text(name)
    expect(detail.locator("div", has_text="id").first).to_be_visible()
    card.locator(".token.sampled").nth(2).click()
    expect(page).to_have_url(re.compile(rf"node={turn.id}&token=2"))
    page.reload()
    expect(page.locator(f"#node-{turn.id} .token.wanted")).to_have_attribute("data-place", "2")
    page.locator(".graph .branches button").nth(0).click()
    expect(page.locator("article.message")).to_have_count(len(trace.branches()[0]))


def test_images_page_shows_where_images_are_used(page: Page, small: str, small_run: Path) -> None:
    page.goto(f"{small}/images")
    expect(page.locator(".words")).to_contain_text("unique")
    page.locator(".gallery a").first.click()
    expect(page.locator("h2")).to_contain_text(["Rollouts with this image"])
    digest = page.url.split("digest=")[1]
    shows = sum(
        any(slot.item.ref.digest == digest for node in trace.nodes for slot in node.slots)
        for step in range(1, 7)
        for trace in read_traces(RunDir(small_run).traces_of(step))
    )
    expect(page.locator(".pager").last).to_contain_text(f"{shows} rollouts")


def test_mismatch_links_to_its_worst_token(page: Page, small: str) -> None:
    page.goto(f"{small}/mismatch")
    expect(page.locator(".dimension")).to_have_count(6)
    expect(page.locator(".words")).to_contain_text("The mean KL over")
    page.locator("table.worst tbody tr").first.locator("a").last.click()
    expect(page.locator(".token.wanted")).to_be_visible()


def test_processes_page_shows_logs_and_settings_page_shows_values(
    page: Page, small: str, small_run: Path
) -> None:
    (small_run / "logs" / "trainer.log").write_text("step 6 done\n")
    page.goto(f"{small}/processes")
    expect(page.locator("table")).to_contain_text(["trainer"])
    page.locator("tr", has_text="trainer").first.click()
    expect(page.locator("pre.log")).to_contain_text("step 6 done")
    page.goto(f"{small}/settings")
    expect(page.locator("table.settings")).to_contain_text("lr")


def test_two_runs_are_compared(page: Page, serve: Serve, small_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "shop-002"
    shutil.copytree(small_run, other)
    config = other / "config.toml"
    config.write_text(config.read_text().replace("lr = 1e-6", "lr = 5e-6"))
    address = serve(small_run, other)
    page.goto(f"{address}/?runs=shop-001,shop-002")
    expect(page.locator("h1")).to_have_text("2 runs")
    expect(page.locator(".chart").first.locator(".legend")).to_contain_text("shop-002")
    page.keyboard.press("6")
    expect(page.locator(".words")).to_contain_text("differ between 2 runs")
    expect(page.locator("tr.differs", has_text="lr")).to_contain_text("0.000005")
    page.get_by_label("only differences").check()
    expect(page.locator("table.settings tbody tr")).to_have_count(
        page.locator("tr.differs").count()
    )


def test_every_page_is_reachable_by_keyboard(page: Page, small: str) -> None:
    page.goto(f"{small}/")
    expect(page.locator("h1")).to_have_text("shop-001")
    page.keyboard.press("2")
    expect(page.locator("h1")).to_have_text("Rollouts")
    first = page.locator("tbody tr").first.locator("a")
    before = first.inner_text()
    page.keyboard.press("n")
    expect(page).to_have_url(re.compile("page=1"))
    expect(first).not_to_have_text(before)  # until then the rows are those of the page before
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("tbody tr").nth(1)).to_have_class(re.compile("at"))
    name = page.locator("tbody tr").nth(1).locator("a").inner_text()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text(name)
    before = page.url
    page.keyboard.press("n")
    expect(page).not_to_have_url(before)
    page.keyboard.press("g")
    expect(page).to_have_url(re.compile("patches=off"))
    page.keyboard.press("Escape")
    expect(page.locator("h1")).to_have_text("Rollouts")
    page.keyboard.press("/")
    page.keyboard.type("click")
    expect(page).to_have_url(re.compile("text=click"))
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_link_with_token_opens_a_non_loopback_dashboard(
    page: Page, serve: Serve, small_run: Path, tmp_path: Path
) -> None:
    token, file = "sixteen-letters-or-more", tmp_path / "token"
    file.write_text(token)
    link = serve(small_run, options=("--host", "0.0.0.0", "--token", f"file:{file}"))
    assert page.context.request.get(f"{link}/api/runs").status == 401
    page.goto(f"{link}/?token={token}")
    expect(page.locator("h1")).to_have_text("shop-001")
    assert "token" not in page.url
