"""`bench cost`: the fit finds prices that are known; real steps are measured and predicted."""

from __future__ import annotations

import random
from dataclasses import astuple
from pathlib import Path

import pytest

from sightline.bench import cost as bench
from sightline.bench.harness.trial import BatchShape, StepBench
from sightline.pack import CostModel, MicroBatchWork

TRUE = CostModel(3e-2, 5e-5, 1e-7, 6e-6, 3e-4, 0.0)


def rows(price: CostModel, num: int, seed: int) -> list[bench.Row]:
    rng = random.Random(seed)
    made = []
    for _ in range(num):
        tokens, patches = rng.randint(10, 9000), rng.choice([0, 0, rng.randint(16, 3000)])
        works = [
            MicroBatchWork(tokens, rng.randint(1, 800) * tokens, tokens // 3, patches, 16 * patches)
            for _ in range(rng.randint(1, 2))
        ]
        made.append(bench.Row(BatchShape(1, 1, 1), works, sum(price.of(work) for work in works)))
    return made


def test_the_fit_finds_the_price_behind_exact_times() -> None:
    price = bench.fit(rows(TRUE, 14, seed=0))
    assert max(bench.error(row, price) for row in rows(TRUE, 20, seed=1)) < 1e-6
    assert min(astuple(price)) >= 0


def test_a_price_of_the_wrong_things_predicts_badly() -> None:
    fitted, tried = rows(TRUE, 14, seed=0), rows(TRUE, 20, seed=1)
    lines = bench.closing_lines(fitted, tried, bench.fit(fitted), CostModel(trained=1.0))
    assert "off by 0.0%" in lines[0] and "off by 0.0%" not in lines[1]


def test_steps_of_several_shapes_are_measured(tiny_model: Path, tmp_path: Path) -> None:
    shapes = [
        BatchShape(2, 8, 4),
        BatchShape(2, 8, 4, images=2, side=64),
        BatchShape(4, 20, 4, group=2),
    ]
    trial = StepBench(tiny_model, tmp_path, "cpu")
    found = bench.measure(trial, shapes, repeats=1)
    trial.close()
    assert [sum(work.patches for work in row.works) for row in found] == [0, 4 * 16, 0]
    assert all(row.seconds > 0 for row in found)
    assert bench.make_table(found, bench.fit(found)).row_count == 3


def test_there_are_twenty_shapes_that_the_fit_does_not_see() -> None:
    assert len(set(bench.TRIED)) == 20 and not set(bench.TRIED) & set(bench.FITTED)


@pytest.mark.parametrize("option", ["--repeats", "--scale"])
def test_nothing_to_measure_is_refused(option: str) -> None:
    from sightline.cli.main import main

    assert main(["bench", "cost", option, "0"]) == 2
