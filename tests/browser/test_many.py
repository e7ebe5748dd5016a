"""Many rollouts (100,000 with `FULL=1`): the cost of a page does not depend on their number."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page, Response, expect
from shards import IS_FULL
from synthetic_run import SyntheticSize, write_synthetic_run

from sightline.run import RunDir
from sightline.view.dashboard.run_view import RunView
from tests.browser.conftest import Serve

NUM_ROLLOUTS = 100_000 if IS_FULL else 20_000
MOST_JSON = 60_000
"""Bytes of one page: 50 rows and the surrounding data."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "many-001"
    write_synthetic_run(path, SyntheticSize(steps=NUM_ROLLOUTS // 500, rollouts_per_step=500))
    return path


class Traffic:
    """The responses that a page received."""

    def __init__(self, page: Page) -> None:
        self.answers: list[Response] = []
        page.on("response", lambda answer: self.answers.append(answer))

    def take(self) -> dict[str, list[int]]:
        """Return the sizes of the responses so far, by kind.

        The stream of events is not included.
        """
        answers, self.answers = self.answers, []
        counts: dict[str, list[int]] = {}
        for answer in answers:
            kind = answer.url.split("?")[0].split("/")[3]
            if "/api/" in answer.url:
                kind = answer.url.split("/api/")[1].split("?")[0]
            if kind != "live":
                counts.setdefault(kind, []).append(len(answer.body()))
        return counts


def test_rollouts_are_loaded_one_page_at_a_time(page: Page, serve: Serve, many: Path) -> None:
    began = time.monotonic()
    view = RunView("many", RunDir(many))
    view.refresh_all()
    print(f"\nindexed {NUM_ROLLOUTS:,} rollouts in {time.monotonic() - began:.1f} s")
    address = serve(many)
    traffic = Traffic(page)
    page.goto(f"{address}/rollouts")
    pager = page.locator(".pager").first
    expect(pager).to_contain_text(f"1–50 of {NUM_ROLLOUTS:,} rollouts")
    page.wait_for_timeout(1500)
    first = traffic.take()
    assert max(first["rollouts"]) < MOST_JSON
    # Thumbnails come for rows in sight, and each distinct one once.
    assert len(first.get("thumb", [])) <= 4 * 50
    text = page.get_by_label("text", exact=True)
    last = f"{NUM_ROLLOUTS - 49:,}–{NUM_ROLLOUTS:,} of"
    fewer = re.compile(rf"of (?!{NUM_ROLLOUTS:,} )[\d,]+ rollouts")
    for how, act, expected in (
        ("next", lambda: page.get_by_title("next (n)").click(), "51–100 of"),
        ("last", lambda: page.get_by_title("last").click(), last),
        ("sort", lambda: page.get_by_label("order").select_option("mismatch"), "1–50 of"),
        ("text", lambda: text.fill("shows"), fewer),
    ):
        began = time.monotonic()
        with page.expect_response(lambda answer: "/api/rollouts" in answer.url):
            act()
        expect(pager).to_contain_text(expected)
        page.wait_for_timeout(300)
        traffic_sizes = traffic.take()
        bytes_asked = sum(sum(sizes) for kind, sizes in traffic_sizes.items() if kind != "thumb")
        print(f"{how}: {time.monotonic() - began:.2f} s, {bytes_asked:,} bytes beside thumbnails")
        assert set(traffic_sizes) <= {"rollouts", "thumb", "facets", "static"}, traffic_sizes
        assert len(traffic_sizes["rollouts"]) <= 2 and max(traffic_sizes["rollouts"]) < MOST_JSON
