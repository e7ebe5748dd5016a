"""`sightline bench stall` on a small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from sightline.bench.stall import draw_pages
from sightline.cli.main import main
from sightline.media import MediaStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("sync", [[], ["--sync"]])
def test_the_command_measures_idle_and_busy_loops(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sync: list[str]
) -> None:
    words = ["--rollouts", "4", "--turns", "2", "--width", "320", "--height", "200"]
    words += ["--idle-s", "0.1", "--model", str(tiny_model), "--dir", str(tmp_path / "d"), *sync]
    assert main(["bench", "stall", *words]) == 0
    said = capsys.readouterr().out
    assert "images known already" in said and "99.9th percentile" in said
    assert "8 screenshots of 320x200" in said
    assert MediaStore(tmp_path / "d" / "run" / "media").count() == 4 * 2 + 5


def test_the_pages_are_as_large_as_screenshots_are(store: MediaStore) -> None:
    sizes = [len(page) for page in draw_pages(1920, 1080)]
    assert min(sizes) > 200_000 and max(sizes) < 1_000_000
    assert sizes == sorted(sizes)
