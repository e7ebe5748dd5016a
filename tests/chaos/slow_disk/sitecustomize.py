"""Found by every Python that the chaos harness starts: tensors reach the disk of a trainer slowly,
so that there is a time in which a checkpoint, or a published version, is half written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

A_TENSOR_S = 0.004


def _slow() -> None:
    from sightline.compute import tensor_file

    quick = tensor_file.iterate_gathered

    def slow(*args: Any) -> Iterator[Any]:
        for found in quick(*args):
            time.sleep(A_TENSOR_S)
            yield found

    tensor_file.iterate_gathered = slow  # type: ignore[assignment]


if "process" in sys.orig_argv and any(word.startswith("trainer") for word in sys.orig_argv):
    _slow()
