"""Errors as they are shown in one line."""

from __future__ import annotations

import traceback

import pytest

from sightline.errors import EngineError, summarize_traceback


def test_error_summary_has_the_problem_without_the_fix() -> None:
    with pytest.raises(EngineError) as caught:
        raise EngineError("the device is full", "take a smaller batch")
    text = "".join(traceback.format_exception(caught.value))
    assert text.splitlines()[-1].startswith("  fix: ")
    assert summarize_traceback(text) == "sightline.errors.EngineError: the device is full"
    assert summarize_traceback("KeyError: 'a'\n") == "KeyError: 'a'"
    assert summarize_traceback("") == ""
