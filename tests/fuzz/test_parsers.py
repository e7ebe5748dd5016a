"""Mutated inputs for every parser of untrusted bytes: each returns or refuses with a message.

The quick tests use 300 inputs per parser from a fixed seed. `make fuzz` uses 10,000.
"""

from __future__ import annotations

import os
import resource
import warnings
from pathlib import Path

import pytest
from shards import IS_FULL

from .harness import FuzzReport, Target, fuzz
from .targets import build_targets

NAMES = (
    "ingest", "data_urls", "image_headers", "videos", "generate", "chat", "responses", "adopt",
    "traces", "control", "run_files", "parquet", "jsonl", "run_dirs",
)  # fmt: skip
NUM_INPUTS = int(os.environ.get("FUZZ", "10000" if IS_FULL else "300"))
QUICK = {"run_dirs": 60}
"""Inputs of the quick tests where each goes through a whole run."""
MAX_GROWTH_KIB = 1 << 20


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Target]:
    parsers = build_targets(tmp_path_factory.mktemp("fuzz"), tiny_model)
    assert tuple(target.name for target in parsers) == NAMES
    return {target.name: target for target in parsers}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_accepted_or_refused(targets: dict[str, Target], name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about EXIF that cannot be read
        num = NUM_INPUTS if "FUZZ" in os.environ or IS_FULL else QUICK.get(name, NUM_INPUTS)
        report = fuzz(targets[name], num, os.environ.get("SEED", "0"))
    if name == NAMES[0]:
        print(f"\n{FuzzReport.HEAD}\n|---|---:|---:|---:|---:|---:|---:|", end="")
    print(f"\n{report}", end="")
    assert report.refused or name == "run_dirs"  # of a run directory what is damaged is left out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
