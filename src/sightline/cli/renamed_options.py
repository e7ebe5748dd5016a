"""Options that had another name: refused with the one that they have now."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.errors import ConfigError

RENAMED_OPTIONS = {
    "--max-len": "--max-model-len",
    "--max-rows": "--max-num-seqs",
    "--prefill-chunk": "--prefill-chunk-tokens",
    "--no-kv-reuse": "--no-enable-prefix-caching",
}
"""The old option of any command, and what it is called now."""


def check_option_names(words: Sequence[str]) -> None:
    """Raises if a word of a command line is an option under an old name."""
    for word in words:
        option = word.partition("=")[0]
        if (new := RENAMED_OPTIONS.get(option)) is not None:
            raise ConfigError(f"{option} is now called {new}", f"write {new}")
