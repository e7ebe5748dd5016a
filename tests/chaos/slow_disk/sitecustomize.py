"""Imported by every Python that the chaos harness starts.

It writes a trainer's tensors slowly, so that checkpoints and published versions are half written
for some time.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

A_TENSOR_S = 0.004


def _slow() -> None:
    from sightline.compute import tensor_file

    quick = tensor_file.iterate_gathered

    def slow(*args: Any) -> Iterator[Any]:
        for item in quick(*args):
            time.sleep(A_TENSOR_S)
            yield item

    tensor_file.iterate_gathered = slow  # type: ignore[assignment]


if "process" in sys.orig_argv and any(word.startswith("trainer") for word in sys.orig_argv):
    _slow()

if os.environ.get("FAKETIME_TIMESTAMP_FILE"):
    # libfaketime treats a sleep on the monotonic clock as one on the wall clock.
    time.sleep = lambda seconds: select.select([], [], [], max(0.0, seconds)) and None  # type: ignore[assignment,func-returns-value]
