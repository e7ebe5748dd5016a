"""`python -m benchmarks materialize` on small images: it compares pixels, and can fail."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import materialize as bench
from benchmarks.harness.reference_processors import load_processor
from sightline.errors import ConfigError
from sightline.families import load_family
from sightline.media import MediaStore


def test_ours_and_transformers_are_compared_in_the_same_run(
    tiny_model: Path, store: MediaStore
) -> None:
    family, pillow = load_family(tiny_model), load_processor(tiny_model, "pil")
    plain = bench.measure(family, store, (64, 96), 2, pillow, None)
    fitted = bench.measure(family, store, (100, 70), 2, pillow, pillow)
    assert plain.is_equal and not plain.is_resized and plain.off is None
    assert fitted.is_equal and fitted.is_resized and fitted.off == 0.0
    assert plain.sent_mb * 8 == pytest.approx(plain.float_mb)
    assert set(bench.stages(fitted, "png")) == {"read", "decode", "resize", "gather", "digest"}
    out = Console(file=io.StringIO(), width=140)
    out.print(bench.decoded_table([plain, fitted]), bench.bytes_table([plain, fitted]))
    assert "100x70" in out.file.getvalue() and "absent" in out.file.getvalue()  # type: ignore

    def other(image: Any) -> Any:
        rows = pillow(image).clone()
        rows[-1, -1] += 1e-7
        return rows

    assert not bench.measure(family, store, (64, 96), 1, other, None).is_equal
    lines = bench.closing_lines([bench.measure(family, store, (64, 96), 1, other, None)])
    assert "DIFFERS" in lines[0]


@pytest.mark.parametrize("text", ["800", "0x9", "ax9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sizes"):
        bench._size(text)
