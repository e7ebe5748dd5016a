"""Keeps a warning of transformers from consoles and logs that says nothing of the checkpoint."""

from __future__ import annotations

import logging

_WARNING = "Model config: pad_token_id must be"


def _is_told(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_WARNING)


def hide_pad_warning() -> None:
    """To read or write a config, transformers builds one of its class's defaults, and warns where
    their `pad_token_id` is none of the vocabulary. No batch here is padded by that id."""
    logging.getLogger("transformers.configuration_utils").addFilter(_is_told)
