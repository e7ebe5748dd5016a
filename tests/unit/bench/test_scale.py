"""`bench scale`: its points are what they say, and steps of a point are real ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sightline.bench import scale as bench
from sightline.bench.harness.trial import BatchShape, RankMeasurement, ScalePoint, measure_steps
from sightline.trainer.ranks import SINGLE_RANK


def test_steps_of_a_point_are_taken_with_the_parts_of_the_trainer(
    tiny_model: Path, tmp_path: Path
) -> None:
    point = ScalePoint(
        str(tiny_model), str(tmp_path), BatchShape(3, 10, 4, images=1, turns=2), 200, 1
    )
    found = measure_steps(
        msgspec.json.decode(msgspec.json.encode(point), type=ScalePoint), SINGLE_RANK
    )
    assert found.wall_s > 0 and found.cpu_s > 0 and found.peak_mb >= found.start_mb > 0
    assert found.tokens > 3 * 2 * (10 + 4) / 2


@pytest.mark.parametrize("what", bench.ALL)
def test_every_axis_has_a_table_a_line_and_a_chart(what: str, tmp_path: Path) -> None:
    lines = [
        bench.Line(
            at, shape.samples, [RankMeasurement(0.2 + at, 0.1 + at, 400 + at, 300, 50)] * ranks
        )
        for at, shape, ranks in bench.points(what)
    ]
    assert len({line.at for line in lines}) == len(lines) >= 3
    assert bench.make_table(what, lines).row_count == len(lines)
    assert any(letter.isdigit() for letter in bench.closing_line(what, lines))
    bench.write_chart(what, lines, tmp_path)
    assert "<svg" in (tmp_path / f"bench_scale_{what}.svg").read_text()


def test_only_the_axis_of_a_table_moves() -> None:
    for what in bench.ALL:
        shapes = [shape for _, shape, _ in bench.points(what)]
        moving = {
            name
            for name in BatchShape.__dataclass_fields__
            if len({getattr(shape, name) for shape in shapes}) > 1
        }
        assert moving == {"batch": {"samples"}, "images": {"images"}, "turns": {"turns"}}.get(
            what, set()
        )
