"""`python -m benchmarks rollout` at a small size: bytes on each connection, not times."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from scripted_policy import ENCODED_IMAGES, count_encoded_images

from benchmarks.harness.rehearsal import (
    RehearsalFigures,
    RehearsalPlan,
    count_base64_bytes,
    rehearse,
)
from benchmarks.rollout import (
    FLAT,
    GROWING,
    agent_table,
)
from sightline.trace import read_traces

ROLLOUTS, TURNS = 4, 3


@pytest.fixture(scope="module")
def played(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RehearsalFigures, Path]:
    """One rehearsal that all tests read. Do not change its files."""
    folder = tmp_path_factory.mktemp("rehearsal") / "run"
    return rehearse(
        RehearsalPlan(ROLLOUTS, TURNS, 96, 64, max_tokens=4), tiny_model, folder
    ), folder


@pytest.fixture
def figures(played: tuple[RehearsalFigures, Path]) -> Iterator[RehearsalFigures]:
    yield played[0]


@pytest.mark.thorough
def test_every_turn_request_names_all_previous_images(figures: RehearsalFigures) -> None:
    assert figures.policy.requests == ROLLOUTS * TURNS
    assert figures.policy.slots == ROLLOUTS * (1 + 2 + 3)
    per_slot = figures.policy.reference_bytes / figures.policy.slots
    assert 200 < per_slot < 600


def test_image_is_stored_once_and_trained_by_reference(figures: RehearsalFigures) -> None:
    assert figures.stored_images == ROLLOUTS * TURNS
    assert figures.samples == ROLLOUTS
    assert figures.slots == ROLLOUTS * TURNS


def test_only_the_store_holds_images(
    played: tuple[RehearsalFigures, Path],
) -> None:
    figures, folder = played
    assert figures.encoded_images == 0
    assert figures.policy.encoded_images == 0
    files = [p for p in folder.rglob("*") if p.is_file() and "media" not in p.parts]
    assert sum(count_encoded_images(path.read_bytes()) for path in files) == 0
    stored = [p for p in (folder / "media").rglob("*") if p.is_file() and p.name != ".lock"]
    assert sum(count_encoded_images(path.read_bytes()) for path in stored) == len(stored) > 0


def test_traces_are_sent_once(played: tuple[RehearsalFigures, Path]) -> None:
    figures, folder = played
    traces = [trace for file in (folder / "traces").iterdir() for trace in read_traces(file)]
    assert [len(trace.turns) for trace in traces] == [TURNS] * ROLLOUTS
    assert not any(trace.error for trace in traces)
    assert 0 < figures.to_orchestrator - figures.traces < 300 * ROLLOUTS
    assert 0 < figures.batch < 2 * figures.traces
    assert 0 < figures.to_worker < 300 * ROLLOUTS


def test_resend_cost_is_counted_from_the_real_images(
    played: tuple[RehearsalFigures, Path],
) -> None:
    figures, folder = played
    urls = 0
    for file in (folder / "traces").iterdir():
        for trace in read_traces(file):
            sizes = [slot.item.ref.nbytes for node in trace.nodes for slot in node.slots]
            for turn in range(1, TURNS + 1):
                urls += sum(22 + count_base64_bytes(size) for size in sizes[:turn])
    assert figures.resent.data_urls == urls
    # 96x64 is 24 patches. A row has 3 channels, 2 frames, 16x16 pixels, 4 bytes each.
    rows = 24 * 3 * 2 * 16 * 16 * 4
    assert figures.resent.floats == ROLLOUTS * (1 + 2 + 3) * count_base64_bytes(rows)
    assert figures.resent.held_floats == ROLLOUTS * TURNS * rows


@pytest.mark.thorough
def test_only_new_images_of_a_resent_history_are_stored(tiny_model: Path, tmp_path: Path) -> None:
    plan = RehearsalPlan(2, TURNS, 96, 64, max_tokens=4, uses_agents=True)
    figures = rehearse(plan, tiny_model, tmp_path / "run")
    assert figures.policy.requests == 2 * TURNS
    assert figures.stored_images == 2 * TURNS, "each page once, however often it came"
    assert figures.encoded_images == figures.policy.encoded_images == 0
    out = io.StringIO()
    Console(file=out, width=200).print(agent_table([figures]))
    for words in ("new images", "CPU of the worker"):
        assert words in out.getvalue()


@pytest.mark.thorough
def test_turn_cost_does_not_grow_with_rollout_length(
    figures: RehearsalFigures, tiny_model: Path, tmp_path: Path
) -> None:
    """Bytes and counts, which are the same on every machine. What is said once a rollout is paid
    by fewer turns in a short one, and numbers in a trace grow by a digit: hence the little room."""
    longer = rehearse(
        RehearsalPlan(ROLLOUTS, 4 * TURNS, 96, 64, max_tokens=4), tiny_model, tmp_path / "run"
    )
    assert longer.stored_images == 4 * figures.stored_images, "one image is put a turn"
    assert longer.slots == 4 * figures.slots, "and trained by one reference"
    for label, of in FLAT:
        short, long = (of(f) / f.plan.num_turns for f in (figures, longer))
        assert long <= 1.1 * short, f"{label}: {short:.0f} bytes a turn, {long:.0f} in long ones"
    # The figures that may grow do grow, so the test can detect growth.
    for label, of in GROWING:
        short, long = (of(f) / f.plan.num_turns for f in (figures, longer))
        assert long > 1.5 * short, label


def test_encoded_images_are_detected() -> None:
    for mark in ENCODED_IMAGES:
        assert count_encoded_images(b"x" + mark + b"y") == 1
    assert count_encoded_images(b"media:sha256:00ff image/png") == 0
