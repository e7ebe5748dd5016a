"""Files of a finished run: references only, each image stored once, none missing."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from loop.conftest import SMALL
from loop.jobs import EXAMPLES, sightline, summary
from sightline.media import MediaStore
from sightline.run import RunDir
from sightline.trace import read_traces
from sightline.view.events import by_step, read_events
from sightline.view.inspect import count_images_in, inspect_run, list_image_free_files
from sightline.wire.micro_batch import StepScores

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run_dir(warm_home: Path) -> RunDir:
    """A short run, to its end."""
    words = (str(EXAMPLES / "cpu.toml"), *SMALL, "run.name=laws", "run.steps=6")
    done = sightline("rl", "--plain", *words, cwd=warm_home)
    last = done.stdout.strip().splitlines()[-2:]
    assert last[0].startswith("run: ") and last[1].startswith("report: ")
    return RunDir(warm_home / last[0].removeprefix("run: "))


def test_no_pixels_outside_the_store(run_dir: RunDir) -> None:
    stored = [path.read_bytes() for path in run_dir.media.rglob("*") if path.is_file()]
    samples = [base64.b64encode(data[:48])[:60] for data in stored if len(data) > 48]
    assert samples
    for path in list_image_free_files(run_dir):
        data = path.read_bytes()
        assert count_images_in(path) == 0, path
        assert not any(sample in data for sample in samples), path


def test_no_float_pixels_outside_the_store(run_dir: RunDir) -> None:
    """Check for long runs of equal words, which a plain square would have as floats."""
    for path in list_image_free_files(run_dir):
        if path.suffix == ".safetensors":
            continue
        assert not re.search(rb"([^\x00]{4})\1{63}", path.read_bytes()), path


def test_every_image_has_a_reference_and_none_is_missing(run_dir: RunDir) -> None:
    store = MediaStore(run_dir.media)
    refs = [
        slot.item.ref
        for file in sorted(run_dir.traces.glob("*.msgpack"))
        for trace in read_traces(file)
        for node in trace.nodes
        for slot in node.slots
    ]
    run_summary = summary(run_dir)
    assert len(refs) == run_summary["images_shown"] > 0
    assert len({ref.digest for ref in refs}) == run_summary["images_stored"]
    assert [ref for ref in refs if not store.has(ref)] == []
    for ref in {ref.digest: ref for ref in refs}.values():
        store.get(ref)


def test_trainer_receives_only_references(run_dir: RunDir) -> None:
    """The batches were removed, so samples are rebuilt from traces and scores."""
    report = inspect_run(run_dir)
    assert report.is_clean and report.steps == report.batches_rebuilt == 6
    assert report.rollouts == sum(summary(run_dir)["verdicts"].values())
    assert report.samples > 0 and report.micro_batches == report.micro_batches_with_references > 0
    assert report.distinct_files == summary(run_dir)["images_stored"]
    assert sightline("inspect", run_dir.path, cwd=run_dir.path).returncode == 0


def test_every_slot_has_the_samplers_pixel_digest(run_dir: RunDir) -> None:
    digests: dict[str, set[str | None]] = {}
    for file in run_dir.traces.glob("*.msgpack"):
        for trace in read_traces(file):
            for node in trace.nodes:
                for slot in node.slots:
                    digests.setdefault(slot.item.ref.digest, set()).add(slot.pixel_digest)
    assert all(
        len(sampler_digests) == 1 and None not in sampler_digests
        for sampler_digests in digests.values()
    )


def test_summary_has_every_field(run_dir: RunDir) -> None:
    run_summary = summary(run_dir)
    assert {
        "reward_start", "reward_final", "steps", "seconds", "mismatch_kl", "tokens_per_s",
        "images_shown", "images_stored", "bad_media", "verdicts",
    } <= run_summary.keys()  # fmt: skip
    assert run_summary["steps"] == 6 and run_summary["bad_media"] == 0
    assert 0 <= run_summary["mismatch_kl"] < 1e-5
    assert sum(run_summary["verdicts"].values()) >= 6 * 4 * 4


def test_step_without_fresh_tokens_reports_null(run_dir: RunDir) -> None:
    lags = {
        s: e.values["lag_max"] for s, e in by_step(read_events(run_dir.metrics), "step").items()
    }
    trained = by_step(read_events(run_dir.metrics), "train")
    probe = trained[5].values["mismatch_kl"]
    assert probe is not None and probe < 1e-5, "a probe step has a fresh group"
    assert set(lags) == set(trained) == set(range(1, 7))
    for event in trained.values():
        is_measured = event.values["mismatch_kl"] is not None
        assert is_measured == (event.values["fresh_tokens"] > 0)
    assert trained[1].values["fresh_tokens"] > 0, "the first step is on policy"


def test_obsolete_batches_and_versions_are_removed(run_dir: RunDir) -> None:
    assert not list(run_dir.batches.glob("*")), "all batches are covered by a checkpoint"
    assert len([p for p in run_dir.weights.iterdir() if p.is_dir()]) == 1
    assert len(list(run_dir.checkpoints.glob("step_*"))) <= 2


def test_scores_cover_every_trained_token(run_dir: RunDir) -> None:
    for step in range(1, 7):
        scores = StepScores.from_bytes(run_dir.scores_of(step).read_bytes())
        traces = {t.id: t for t in read_traces(run_dir.traces_of(step))}
        assert sum(o.stop - o.start for o in scores.origins) == len(scores.logprobs)
        for origin in scores.origins:
            node = traces[origin.trace_id].nodes[origin.node]
            assert node.num_sampled == origin.stop - origin.start


def test_the_run_held_a_lease_on_its_images_until_its_end(run_dir: RunDir) -> None:
    leases = run_dir.media / ".leases"
    assert leases.is_dir() and list(leases.iterdir()) == []


def test_gc_keeps_every_image_the_run_refers_to(run_dir: RunDir) -> None:
    done = sightline("media", "gc", "--run", run_dir.path, "--min-age-s", "0", cwd=run_dir.path)
    run_summary = summary(run_dir)
    assert MediaStore(run_dir.media).count() == run_summary["images_stored"], done.stdout
