"""Keeps a warning of transformers from consoles and logs that says nothing of the checkpoint."""

from __future__ import annotations

import logging

_WARNING = "Model config: pad_token_id must be"


def _is_told(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_WARNING)


def hide_pad_warning() -> None:
    """To read or write a config, transformers builds one of its class's defaults, which it finds
    wrong itself: the `pad_token_id` of SmolVLM's. No batch here is padded by that id."""
    logging.getLogger("transformers.configuration_utils").addFilter(_is_told)
