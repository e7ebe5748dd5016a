"""Read a run's common files: settings, images, tokenizer and summary.

Missing or damaged files count as empty. Setting names from earlier versions are translated.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
from sightline.regular_file import read_bytes, read_text
from sightline.render import Tokenizer
from sightline.run.run_dir import RunDir
from sightline.view.fenced_run_dir import FencedRunDir, is_below
from sightline.wire.codec import UNREADABLE

MAX_NOTE_CHARS = 20_000
STORE_DEADLINE_S = 5.0
"""Time limit for retries at a remote store, after which an image counts as missing."""


def flatten_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings with their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def list_runs(paths: Iterable[Path]) -> dict[Path, FencedRunDir]:
    """Return the runs at these paths and in these folders, without links out of their folder."""
    runs: dict[Path, FencedRunDir] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"there is no folder {path}", "pass a run, or a folder of runs")
        root = path.resolve()
        for run in [path] if is_run(path) else sorted(path.iterdir()):
            if is_below(root, run) and is_run(run):
                runs.setdefault(run, FencedRunDir(run, root))
    return runs


def get_run_dir(path: Path) -> RunDir:
    """Return the run directory at `path`. Raise if there is none."""
    if not is_run(path) and is_run(Path("runs") / path):
        path = Path("runs") / path
    if not is_run(path):
        raise ConfigError(
            f"{path} is not a run directory", "pass the folder with config.toml and metrics.jsonl"
        )
    return RunDir(path)


class RunFiles:
    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    @property
    def settings_text(self) -> str:
        """`config.toml` as the run wrote it, without secrets."""
        return hide_secrets(_read_text(self.run_dir.config))

    @property
    def notes(self) -> str:
        """The contents of notes.md."""
        return _read_text(self.run_dir.notes)[:MAX_NOTE_CHARS]

    @property
    def settings(self) -> dict[str, Any]:
        """The sections of the run file with current names. Empty if it is missing or damaged."""
        try:
            values = tomllib.loads(self.settings_text)
        except tomllib.TOMLDecodeError:
            return {}
        try:
            return translate_old_names(values)
        except AttributeError:  # a value in place of a section
            return values

    def get_setting(self, section: str, name: str) -> str:
        """Return a setting as text. Empty if it is not set."""
        return str(self.get_section(section).get(name) or "")

    def get_section(self, name: str) -> dict[str, Any]:
        """Return a section of the run file. Empty if it is missing or damaged."""
        section = self.settings.get(name)
        return section if isinstance(section, dict) else {}

    def open_store(self) -> MediaStore:
        """Open the run's own store together with the store named in its settings."""
        root, options = self.get_setting("media", "root"), {}
        if is_address(root):
            names = ("token", "cache_dir", "cache_gb")
            settings = {name: self.get_setting("media", name) for name in names}
            settings = {name: value for name, value in settings.items() if value}
            try:
                options = validate_config(MediaConfig, settings, "[media]").store_options()
            except ConfigError:  # its token is not available here
                root = ""
        roots = [root] if root else []
        return open_store(self.run_dir.media, roots, deadline_s=STORE_DEADLINE_S, **options)

    @cached_property
    def checkpoint(self) -> Path | None:
        """A folder with the tokenizer: the initial or the final checkpoint."""
        named = self.get_setting("model", "path")
        around = [Path(named), self.run_dir.path.resolve().parent.parent / named] if named else []
        for path in (*around, self.run_dir.checkpoints / "final"):
            if (path / "tokenizer.json").is_file():
                return path
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None without a checkpoint. Tokens are then shown as ids."""
        with suppress(Exception):  # the library may raise anything for unreadable files
            return Tokenizer(self.checkpoint) if self.checkpoint else None
        return None

    @cached_property
    def family(self) -> Family | None:
        """The model family; None without a checkpoint, or if the family is not installed."""
        table = self.get_section("model")
        limits = {k: table[k] for k in ("min_pixels", "max_pixels") if table.get(k) is not None}
        with suppress(Exception):  # families of other packages may raise anything
            return load_family(self.checkpoint, **limits) if self.checkpoint else None
        return None

    def find_summary(self) -> dict[str, Any] | None:
        """Return the summary on disk, or None if the run has continued since."""
        metrics = self.run_dir.metrics
        with suppress(OSError, *UNREADABLE):
            newest = metrics.stat().st_mtime if metrics.exists() else 0.0
            if self.run_dir.summary.stat().st_mtime >= newest:
                return msgspec.json.decode(read_bytes(self.run_dir.summary), type=dict[str, Any])
        return None
