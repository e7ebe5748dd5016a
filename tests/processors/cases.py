"""Checkpoints of the generic family whose image processors run on torchvision alone, for the suites
of tests/contract: `--cases tests.processors.cases`."""

from __future__ import annotations

from shards import take_first

from tests.contract.case import Case
from tests.contract.cases.anyvlm import build_case

KINDS = ("lfm2_vl", "llama4")
CASES: tuple[Case, ...] = tuple(map(build_case, take_first(KINDS, 1)))
