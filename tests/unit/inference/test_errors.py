"""The tables of error types in the code and in the docs are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sightline.errors import (
    FingerprintMismatch,
    MediaCorrupt,
    MediaError,
    MediaMissing,
    MediaRefused,
    MediaUndecodable,
    Misaligned,
    WeightsError,
    WireError,
)
from sightline.inference.errors import STATUS_BY_TYPE, error_response, to_engine_error

DOCS = Path(__file__).parents[3] / "docs" / "serving_api.md"
ROW = re.compile(r"\| (\d{3}) \| `(\w+)` \| (.+) \|")


def test_docs_list_every_error_type_with_its_status() -> None:
    rows = ROW.findall(DOCS.read_text())
    assert {kind: int(status) for status, kind, _ in rows} == STATUS_BY_TYPE
    assert len(rows) == len(STATUS_BY_TYPE) and all(meaning.strip() for *_, meaning in rows)


ERRORS: list[tuple[BaseException, str]] = [
    (FingerprintMismatch("a", "b"), "fingerprint"),
    (MediaMissing("a", "b"), "media_missing"),
    (MediaCorrupt("a", "b"), "media_corrupt"),
    (MediaUndecodable("a", "b"), "media_undecodable"),
    (MediaRefused("a", "b"), "media_refused"),
    (MediaError("a", "b"), "media_refused"),
    (WireError("a", "b"), "schema"),
    (Misaligned("a", "b"), "slots"),
    (WeightsError("a", "b"), "weights"),
    (PermissionError("a"), "engine"),
    (ZeroDivisionError("a"), "engine"),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS, ids=lambda value: type(value).__name__)
def test_every_error_has_one_type(error: BaseException, kind: str) -> None:
    found = to_engine_error(error)
    response = error_response(found)
    assert (found.kind, response.status_code) == (kind, STATUS_BY_TYPE[kind])
    assert ("retry-after" in response.headers) == (response.status_code == 503)


def test_unreadable_store_is_retryable_and_damaged_file_is_not() -> None:
    unread, damaged = MediaError("a", "b"), MediaUndecodable("a", "b")
    unread.__cause__ = damaged.__cause__ = OSError("later")
    assert to_engine_error(unread).status == 503 and to_engine_error(damaged).status == 422
