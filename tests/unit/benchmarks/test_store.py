"""`python -m benchmarks store`: figures of each kind of store, and words while they are taken."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from store_kinds import KINDS, TOKEN

from benchmarks.store import PLAIN, Progress, measure

ARGS = Namespace(images=20, side=8, threads=2, cache_mb=10)


def test_each_kind_has_its_memory_and_its_cache_hits(tmp_path: Path) -> None:
    with KINDS["http"](tmp_path) as kind:
        roots = {PLAIN: 0.0, str(tmp_path / "folder"): 0.0, str(kind.store.root): 1.0}
        for number, (root, hits) in enumerate(roots.items()):
            found = measure(root, TOKEN, tmp_path / f"work-{number}", ARGS)
            assert found.hit_fraction == hits and found.peak_mb >= 0
            assert min(found.put_s, found.read_s, found.read_again_s) > 0


def test_long_work_says_how_far_it_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    for every_s in (3600.0, 0.0):
        say_progress = Progress("s3://b: put", 2000, every_s)
        say_progress()
    assert capsys.readouterr().err == "s3://b: put 1 of 2,000 images\n"
