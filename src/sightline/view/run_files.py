"""The files of a run that every reader needs: settings, images, tokenizer, summary.

Anything may be missing or damaged, and a run of an earlier version keeps its settings under the
names of that version: what cannot be read is left out, and old names are translated.
"""

from __future__ import annotations

import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from sightline.config import MediaConfig, validate_config
from sightline.config.renamed import translate_old_names
from sightline.config.secret_refs import hide_secrets
from sightline.errors import ConfigError
from sightline.families import Family, load_family
from sightline.media import MediaStore, is_address, open_store
from sightline.render import Tokenizer
from sightline.run.run_dir import RunDir
from sightline.wire.codec import UNREADABLE

MAX_NOTE_CHARS = 20_000
STORE_DEADLINE_S = 5.0
"""For which a store elsewhere is asked again before an image counts as missing."""


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def get_run_dir(path: Path) -> RunDir:
    """The run directory at `path`; refuses a folder that holds no run."""
    if not is_run(path) and is_run(Path("runs") / path):
        path = Path("runs") / path
    if not is_run(path):
        raise ConfigError(
            f"{path} is no run directory",
            "name the folder that holds config.toml and metrics.jsonl",
        )
    return RunDir(path)


class RunFiles:
    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    @property
    def settings_text(self) -> str:
        """`config.toml` as the run wrote it, in the names of its own version, without secrets."""
        try:
            return hide_secrets(self.run_dir.config.read_text(errors="replace"))
        except OSError:
            return ""

    @property
    def notes(self) -> str:
        """What a person wrote about the run."""
        try:
            return self.run_dir.notes.read_text(errors="replace")[:MAX_NOTE_CHARS]
        except OSError:
            return ""

    @property
    def settings(self) -> dict[str, Any]:
        """Sections of the run file under today's names; empty where it is missing or damaged."""
        try:
            values = tomllib.loads(self.settings_text)
        except tomllib.TOMLDecodeError:
            return {}
        try:
            return translate_old_names(values)
        except AttributeError:  # a value stands where a section should
            return values

    def get_setting(self, section: str, name: str) -> str:
        """A setting as text; empty where it is not set."""
        table = self.settings.get(section)
        return str(table.get(name) or "") if isinstance(table, dict) else ""

    def open_store(self) -> MediaStore:
        """The images of the run: its own, and those of the store that its settings name."""
        root, options = self.get_setting("media", "root"), {}
        if is_address(root):
            names = ("token", "cache_dir", "cache_gb")
            given = {name: self.get_setting("media", name) for name in names}
            given = {name: value for name, value in given.items() if value}
            try:
                options = validate_config(MediaConfig, given, "[media]").store_options()
            except ConfigError:  # the token is not to be had here
                root = ""
        roots = [root] if root else []
        return open_store(self.run_dir.media, roots, deadline_s=STORE_DEADLINE_S, **options)

    @cached_property
    def checkpoint(self) -> Path | None:
        """A folder with the tokenizer: what the run started from, or what it left."""
        named = self.get_setting("model", "path")
        around = [Path(named), self.run_dir.path.resolve().parent.parent / named] if named else []
        for path in (*around, self.run_dir.checkpoints / "final"):
            if (path / "tokenizer.json").is_file():
                return path
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None without a checkpoint: tokens then show as their ids, and answers as plain text."""
        if self.checkpoint is None:
            return None
        try:
            return Tokenizer(self.checkpoint)
        except Exception:  # the library raises this very class for a file that it cannot read
            return None

    @cached_property
    def family(self) -> Family | None:
        """None without a checkpoint, or where its family is not installed."""
        if self.checkpoint is None:
            return None
        table = self.settings.get("model") or {}
        named = {k: table[k] for k in ("min_pixels", "max_pixels") if table.get(k) is not None}
        try:
            return load_family(self.checkpoint, **named)
        except Exception:  # a family outside this package may raise anything
            return None

    def find_summary(self) -> dict[str, Any] | None:
        """The written summary, unless the run has gone on since."""
        metrics = self.run_dir.metrics
        try:
            newest = metrics.stat().st_mtime if metrics.exists() else 0.0
            if self.run_dir.summary.stat().st_mtime >= newest:
                return msgspec.json.decode(self.run_dir.summary.read_bytes(), type=dict[str, Any])
        except (OSError, *UNREADABLE):
            pass
        return None
