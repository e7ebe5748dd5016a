"""Images in the cells of a table: which columns hold them, and how they become refs."""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sightline.errors import MediaRefused
from sightline.media import MediaRef

FEATURES_KEY = b"huggingface"
"""Where the `datasets` library writes, in a schema, what its columns are."""


def image_columns(schema: Any) -> frozenset[str]:
    """Columns of images, or of lists of images."""
    notes = json.loads((schema.metadata or {}).get(FEATURES_KEY, b"{}"))
    features = notes.get("info", {}).get("features", {})
    return frozenset(name for name, feature in features.items() if _holds_images(feature))


def _holds_images(feature: Any) -> bool:
    if isinstance(feature, list):  # how older versions write a list
        return any(map(_holds_images, feature))
    if not isinstance(feature, dict):
        return False
    return feature.get("_type") == "Image" or _holds_images(feature.get("feature"))


def put_cell_images(value: Any, put: Callable[[Any], MediaRef], folder: Path, where: str) -> Any:
    """The cell with refs for its images: bytes, a path under `folder`, a data URL, or a list."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [put_cell_images(v, put, folder, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return put(value)
    if isinstance(value, str) and value.startswith("data:"):
        return put(_decode_data_url(value, where))
    if isinstance(value, str) and value:
        return put(_get_path_below(folder, value, where))
    raise MediaRefused(
        f"{where}: a {type(value).__name__} where an image should be",
        "give bytes, a path below the file's folder, or a data URL",
    )


def _decode_data_url(url: str, where: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("not in base64")
        return binascii.a2b_base64(body, strict_mode=True)
    except ValueError as error:
        raise MediaRefused(f"{where}: a data URL that is no image: {error}", "mend it") from error


def _get_path_below(folder: Path, name: str, where: str) -> Path:
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise MediaRefused(
            f"{where}: {name!r} leads out of {folder}", "keep images below the file that names them"
        )
    return path
