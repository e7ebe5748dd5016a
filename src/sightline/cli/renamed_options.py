"""Options that had another name: refused with the one that they have now."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.errors import ConfigError

RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "serve": {
        "--max-len": "--max-model-len",
        "--max-rows": "--max-num-seqs",
        "--prefill-chunk": "--prefill-chunk-tokens",
        "--no-kv-reuse": "--no-enable-prefix-caching",
    },
    "eval": {
        "--max-len": "--max-model-len",
        "--at-once": "--max-concurrent",
        "--args": "--env-args",
    },
    "inspect": {"--shows-images": "--require-images"},
    "samples": {"--max-mb": "--max-image-mb"},
    "trace": {"--out": "--output"},
}
"""For each command its old options, and what they are called now."""


def check_option_names(words: Sequence[str]) -> None:
    """Refuses an option under its old name, with the new one."""
    command = next((word for word in words if not word.startswith("-")), "")
    for word in words:
        option = word.partition("=")[0]
        if new := RENAMED_OPTIONS.get(command, {}).get(option):
            raise ConfigError(f"{option} is now called {new}", f"write {new}")
