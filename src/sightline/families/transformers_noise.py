"""Suppress a transformers warning that is not about the checkpoint."""

from __future__ import annotations

import logging

_WARNING = "Model config: pad_token_id must be"


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_WARNING)


def hide_pad_warning() -> None:
    """Hide a warning about the `pad_token_id` of a config class's defaults.

    transformers builds these defaults whenever it reads or writes a config. No batch here is padded
    with that id.
    """
    logging.getLogger("transformers.configuration_utils").addFilter(_is_wanted)
