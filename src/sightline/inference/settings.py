"""What a server is built from. Plain values: the run file and the command line both make them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sightline.families import Family

MEBIBYTE = 2**20


def pick_pixel_threads(asked: int) -> int:
    """0 follows the cores: decoding must keep up with a device, and leave the rest to others."""
    return asked or max(1, min(8, (os.cpu_count() or 1) // 2))


def describe_prefix_reuse(family: Family, keeps_kv: bool = True) -> str:
    """What a turn finds of the one before it, and why."""
    if not keeps_kv:
        return "turns: each prefilled anew (the engine keeps no keys and values between requests)"
    if family.packing.carries_state:
        return (
            "turns: each prefilled anew (a state that layers carry along a row cannot be cut back "
            "to what two prompts share)"
        )
    return "turns: continued (keys and values stay for a prompt that begins with their tokens)"


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    model: Path
    """Folder of the checkpoint."""
    media_roots: tuple[Path, ...]
    """Store roots, in the order in which they are asked."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one; the server prints which."""
    device: str = "auto"
    dtype: str = "float32"
    max_num_seqs: int = 256
    """Sequences in flight, or kept for their next turn."""
    max_model_len: int = 2048
    """Most tokens of a sequence, prompt and answer."""
    prefill_chunk_tokens: int = 512
    """Most prompt tokens of one sequence that are computed in one step."""
    pixel_cache_bytes: int = 256 * MEBIBYTE
    feature_cache_bytes: int = 256 * MEBIBYTE
    enable_prefix_caching: bool = True
    """Whether a finished sequence keeps its keys and values for the next turn, where its model
    has no other state."""
    threads: int = 1
    """Compute threads."""
    pixel_threads: int = 1
    """Threads that decode images."""
    max_waiting: int = 4096
    """Requests that wait; one more is answered with 503."""
    max_waiting_bytes: int = 4096 * MEBIBYTE
    """Of the prompts and the decoded images of requests that wait; likewise."""
    max_body_bytes: int = 64 * MEBIBYTE
    overrides: dict[str, int] = field(default_factory=dict)
    """Processor settings that win over the checkpoint's: min_pixels, max_pixels."""
    manifest: Path | None = None
    """Weights to begin with; without it the checkpoint's own, as version 0."""
    keep_kv_over_updates: bool = False
    """Whether keys and values of old weights stay in use after an update."""

    otel: str = ""
    """Where its stages go as OpenTelemetry spans: the address of an OTLP/HTTP collector, or the
    path of a file; nowhere if empty."""
    name: str = "server"
    """What they call this process."""

    def to_json(self) -> dict[str, Any]:
        """For a process that is started with it."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return found

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ServeSettings:
        return msgspec.convert(values, cls, dec_hook=lambda kind, value: kind(value))
