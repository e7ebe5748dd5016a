"""`python -m benchmarks rollout` at a small size: what crosses the wires, never how fast."""

from __future__ import annotations

import argparse
import io
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from rich.console import Console
from scripted_policy import ENCODED_IMAGES, count_encoded_images

from benchmarks import rollout as bench_rollout
from benchmarks.__main__ import main
from benchmarks.harness.rehearsal import (
    ORCHESTRATOR,
    WORKER,
    RehearsalFigures,
    RehearsalPlan,
    ResentBytes,
    count_base64_bytes,
    read_cpu,
    rehearse,
)
from benchmarks.rollout import (
    FLAT,
    GROWING,
    agent_table,
    closing_lines,
    cpu_table,
    memory_table,
    turn_counts,
    wire_table,
    write_agent_plot,
    write_plots,
)
from sightline.bench.harness.screenshots import SCREENSHOTS, Screenshots
from sightline.envs import load_environment
from sightline.errors import ConfigError
from sightline.trace import read_traces

ROLLOUTS, TURNS = 4, 3


@pytest.fixture(scope="module")
def played(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RehearsalFigures, Path]:
    """One rehearsal that all tests look at; do not change its files."""
    folder = tmp_path_factory.mktemp("rehearsal") / "run"
    return rehearse(
        RehearsalPlan(ROLLOUTS, TURNS, 96, 64, max_tokens=4), tiny_model, folder
    ), folder


@pytest.fixture
def figures(played: tuple[RehearsalFigures, Path]) -> Iterator[RehearsalFigures]:
    yield played[0]


def test_every_turn_is_a_request_that_names_all_images_so_far(figures: RehearsalFigures) -> None:
    assert figures.policy.requests == ROLLOUTS * TURNS
    assert figures.policy.slots == ROLLOUTS * (1 + 2 + 3)
    per_slot = figures.policy.reference_bytes / figures.policy.slots
    assert 200 < per_slot < 600


def test_the_parts_of_the_requests_fit_into_the_whole(figures: RehearsalFigures) -> None:
    policy = figures.policy
    assert policy.id_bytes > 2 * ROLLOUTS * policy.longest_prompt
    assert policy.id_bytes + policy.reference_bytes < policy.received_bytes
    rest = policy.received_bytes - policy.id_bytes - policy.reference_bytes
    assert rest < 400 * policy.requests


def test_an_image_is_stored_once_and_trained_by_its_reference(figures: RehearsalFigures) -> None:
    assert figures.stored_images == ROLLOUTS * TURNS
    assert figures.samples == ROLLOUTS
    assert figures.slots == ROLLOUTS * TURNS


def test_no_message_and_no_file_outside_the_store_holds_an_image(
    played: tuple[RehearsalFigures, Path],
) -> None:
    figures, folder = played
    assert figures.encoded_images == 0
    assert figures.policy.encoded_images == 0
    files = [p for p in folder.rglob("*") if p.is_file() and "media" not in p.parts]
    assert sum(count_encoded_images(path.read_bytes()) for path in files) == 0
    stored = [p for p in (folder / "media").rglob("*") if p.is_file() and p.name != ".lock"]
    assert sum(count_encoded_images(path.read_bytes()) for path in stored) == len(stored) > 0


def test_traces_cross_the_wire_once(played: tuple[RehearsalFigures, Path]) -> None:
    figures, folder = played
    traces = [trace for file in (folder / "traces").iterdir() for trace in read_traces(file)]
    assert [len(trace.turns) for trace in traces] == [TURNS] * ROLLOUTS
    assert not any(trace.error for trace in traces)
    assert 0 < figures.to_orchestrator - figures.traces < 300 * ROLLOUTS
    assert 0 < figures.batch < 2 * figures.traces
    assert 0 < figures.to_worker < 300 * ROLLOUTS


def test_memory_is_read_for_both_processes(figures: RehearsalFigures) -> None:
    assert set(figures.memory) == {ORCHESTRATOR, WORKER}
    for memory in figures.memory.values():
        assert 10_000_000 < memory.start <= memory.peak < 1_000_000_000


def test_what_would_be_sent_again_is_counted_from_the_real_images(
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
    # 96x64 is 24 patches; a row has 3 channels, 2 frames, 16x16 pixels, 4 bytes each.
    rows = 24 * 3 * 2 * 16 * 16 * 4
    assert figures.resent.floats == ROLLOUTS * (1 + 2 + 3) * count_base64_bytes(rows)
    assert figures.resent.held_floats == ROLLOUTS * TURNS * rows


def test_the_tables_show_every_wire(figures: RehearsalFigures) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in (
        memory_table([figures]),
        wire_table([figures]),
        cpu_table([figures]),
        *closing_lines([figures]),
    ):
        console.print(part)
    shown = out.getvalue()
    for words in ("orchestrator: peak", "worker-0: peak", "references", "data URLs", "CPU time"):
        assert words in shown
    assert "encoded images in messages, batches and traces: 0" in shown


def test_the_command_plays_rollouts_of_one_to_all_of_the_turns(
    figures: RehearsalFigures, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[argparse.Namespace] = []

    def measure(args: argparse.Namespace, folder: Path) -> list[RehearsalFigures]:
        asked.append(args)
        return [figures]

    monkeypatch.setattr(bench_rollout, "measure", measure)
    words = ["rollout", "--rollouts", "4", "--turns", "3", "--agents", "0"]
    assert main(words) == 0
    assert "Bytes on each wire" in capsys.readouterr().out
    assert (asked[0].rollouts, asked[0].width, asked[0].height) == (4, 1280, 720)
    assert turn_counts(100) == [1, 10, 25, 50, 100]
    assert turn_counts(1) == [1]


def test_cpu_time_is_read_for_both_processes(figures: RehearsalFigures) -> None:
    assert set(figures.cpu_s) == {ORCHESTRATOR, WORKER}


def test_the_cpu_time_of_a_process_is_what_it_computed() -> None:
    """The kernel counts in ticks of 10 ms, so that a process needs some of them to be seen."""
    before, begun = time.process_time(), read_cpu(os.getpid())
    while time.process_time() - before < 0.2:
        pass
    assert read_cpu(os.getpid()) - begun > 0.05


def test_the_plots_show_every_figure_by_turns(figures: RehearsalFigures, tmp_path: Path) -> None:
    write_plots([figures, figures], tmp_path)
    drawn = {
        path.stem.removeprefix("bench_rollout_"): path.read_text() for path in tmp_path.iterdir()
    }
    assert set(drawn) == {"flat", "growing", "cpu", "memory"}
    assert "prompt ids" in drawn["growing"] and "worker" in drawn["cpu"]
    assert all(svg.startswith("<svg") for svg in drawn.values())


def test_an_agent_sends_its_history_again_and_only_its_new_images_are_stored(
    tiny_model: Path, tmp_path: Path
) -> None:
    plan = RehearsalPlan(2, TURNS, 96, 64, max_tokens=4, uses_agents=True)
    figures = rehearse(plan, tiny_model, tmp_path / "run")
    assert figures.policy.requests == 2 * TURNS
    assert figures.stored_images == 2 * TURNS, "each page once, however often it came"
    # The first page came three times, the second twice, the third once: twice what was new.
    resent = (figures.from_agents - figures.first_sent) / figures.first_sent
    assert 0.8 < resent < 1.5
    assert figures.to_agents > 0
    assert figures.encoded_images == figures.policy.encoded_images == 0
    out = io.StringIO()
    Console(file=out, width=200).print(agent_table([figures]))
    for words in ("the history again", "CPU of the worker"):
        assert words in out.getvalue()
    write_agent_plot([figures, figures], tmp_path)
    assert (tmp_path / "bench_rollout_agents.svg").read_text().startswith("<svg")


def test_a_turn_of_a_long_rollout_costs_what_one_of_a_short_rollout_costs(
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
    # The figures that may grow do so: a test that could not see it would prove nothing.
    for label, of in GROWING:
        short, long = (of(f) / f.plan.num_turns for f in (figures, longer))
        assert long > 1.5 * short, label


@pytest.mark.parametrize("words", [["--rollouts", "0"], ["--turns", "0"], ["--width", "8"]])
def test_sizes_that_make_no_sense_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", *words]) == 2
    assert "take at least" in capsys.readouterr().err


def test_rollouts_come_in_groups() -> None:
    assert [RehearsalPlan(n, 1, 32, 32).group_size for n in (64, 12, 6)] == [8, 4, 2]
    with pytest.raises(ConfigError):
        _ = RehearsalPlan(7, 1, 32, 32).group_size


def test_sending_everything_again_grows_with_the_square_of_the_turns() -> None:
    class Slot(msgspec.Struct):
        item: int

    ref = msgspec.defstruct("Ref", ["nbytes"])(nbytes=300)
    item = msgspec.defstruct("Item", ["ref"])(ref=ref)
    for turns, times in ((10, 55), (20, 210)):
        sample = msgspec.defstruct("Sample", ["slots", "items"])([Slot(0)] * turns, [item])
        resent = ResentBytes()
        resent.add(msgspec.defstruct("Batch", ["samples"])([sample]), lambda item: 3000)  # type: ignore[arg-type]
        assert resent == ResentBytes(times * (22 + 400), times * 4000, turns * 3000)


def test_encoded_images_are_found() -> None:
    for mark in ENCODED_IMAGES:
        assert count_encoded_images(b"x" + mark + b"y") == 1
    assert count_encoded_images(b"media:sha256:00ff image/png") == 0


def test_a_page_is_a_new_image_of_a_realistic_size() -> None:
    env = load_environment(SCREENSHOTS, {})
    assert isinstance(env, Screenshots)
    rng = random.Random(0)
    pages = [env.draw(rng) for _ in range(3)]
    assert len(set(pages)) == 3
    assert all(50_000 < len(page) < 500_000 for page in pages)
    assert Image.open(io.BytesIO(pages[0])).size == (1280, 720)
