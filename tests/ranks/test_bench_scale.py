"""`bench scale` on two ranks: real processes that share the work of a step."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from sightline.bench import scale as bench
from sightline.bench.harness.trial import BatchShape

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


def test_two_ranks_share_the_tokens_of_a_step(tiny_model: Path, tmp_path: Path) -> None:
    shape = BatchShape(128, 24, 8, images=1)
    found = bench.measure(tiny_model, tmp_path / "two", shape, 2, Namespace(repeats=1))
    first, second = (one.tokens for one in found)
    assert min(first, second) > 0.4 * (first + second)
