"""A run whose processes find images at an address, and have no folder for them in common."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chaos.proxy import Proxy
from store_kinds import KINDS, TOKEN

from loop.jobs import ledger, sightline, summary
from sightline.families.registry import write_tiny
from sightline.run import RunDir

pytestmark = [pytest.mark.loop, pytest.mark.timeout(300)]

RUN = """
[run]
name = "apart"
steps = 3
[model]
path = "models/tiny"
[env]
name = "vowels:Vowels"
[media]
root = "ADDRESS"
token = "env:MEDIA_TOKEN"
cache_dir = "cache"
[rollout]
max_tokens = 8
[orchestrator]
groups_per_step = 3
group_size = 4
[eval]
tasks = 0
[inference]
max_model_len = 256
"""


def test_a_run_trains_on_images_of_a_media_service_that_often_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIA_TOKEN", TOKEN)
    shutil.copy(Path(__file__).with_name("vowels.py"), tmp_path)
    write_tiny("qwen_vl", tmp_path / "models" / "tiny", seed=0)
    with KINDS["http"](tmp_path) as kind, Proxy(str(kind.store.root), "/media") as proxy:
        (tmp_path / "run.toml").write_text(RUN.replace("ADDRESS", proxy.url))
        with proxy.disturbed("refusals"):
            sightline("rl", "--plain", "run.toml", cwd=tmp_path)
        run_dir = RunDir(tmp_path / "runs" / "apart-001")
        assert [step for step, _ in ledger(run_dir)] == [1, 2, 3]
        told = summary(run_dir)
        assert told["bad_media"] == 0 and told["mismatch_kl"] < 1e-6
        assert not run_dir.media.exists()
        assert told["images_stored"] == kind.store.count() == len(kind.backing.names()) > 0
        assert TOKEN not in run_dir.config.read_text()
        there = ["--store", proxy.url, "--token", "env:MEDIA_TOKEN"]
        words = ["media", "gc", *there, "--run", run_dir.path, "--min-age-s", "0", "--dry-run"]
        assert "would remove 0 images" in sightline(*words, cwd=tmp_path).stdout
        sightline("media", "verify", *there, cwd=tmp_path)
        sightline("inspect", run_dir.path, cwd=tmp_path)
