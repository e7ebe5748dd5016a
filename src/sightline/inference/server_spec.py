"""What a server process is built from: two sections of a run file, and what the process adds.

A run passes its own `[model]` and `[inference]`; `sightline serve` makes the same two from options
that carry the names of the settings.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from sightline.config import InferenceConfig, ModelConfig
from sightline.config.load import validate_config
from sightline.config.secret_refs import resolve_secret
from sightline.config.section import ConfigSection, SecretRef
from sightline.families import Family
from sightline.media import MediaStore, open_store
from sightline.media.stored_file import open_blobs
from sightline.rollout.engines import load_engine

MEBIBYTE = 2**20
SECTIONS: dict[str, type[ConfigSection]] = {"model": ModelConfig, "inference": InferenceConfig}


class ServerSpec(ConfigSection):
    model: ModelConfig
    inference: InferenceConfig = InferenceConfig()
    media_roots: tuple[Annotated[str, BeforeValidator(str)], ...] = Field(
        ...,
        min_length=1,
        description="Roots of the store, folders or addresses, in the order in which they are "
        "asked.",
    )
    media_token: SecretRef = Field(
        "",
        description="Where the token is that a media service asks for: env:NAME or file:PATH.",
    )
    media_cache_dir: str = Field(
        "",
        description="Folder that keeps images of a store elsewhere; ~/.cache/sightline/media if "
        "empty.",
    )
    media_cache_gb: float = Field(10.0, ge=0, description="Most GB of that folder.")
    max_media_gb: float = Field(
        50.0,
        gt=0,
        description="Most GB of the first store root; an image of a chat request that would exceed "
        "them, or leave less than 1 GiB on the disk, is answered with 507.",
    )
    weights: Path | None = Field(
        None, description="Manifest of the weights to begin with, in place of the checkpoint's own."
    )
    weights_root: Path | None = Field(
        None,
        description="Folder under which weights may be adopted, such as that of the runs which use "
        "this server; none are adopted without one.",
    )
    run_id: str = Field("", description="Id of the run that starts the server for itself.")
    enable_prefix_caching: bool = Field(
        True,
        description="Whether a finished sequence keeps its KV cache for the next turn, where its "
        "model has no other state.",
    )
    max_waiting: int = Field(
        4096, ge=0, description="Requests that may wait; one more is answered with 503."
    )
    max_waiting_mb: float = Field(
        4096,
        ge=0,
        description="Memory for prompts and decoded images of requests that wait; a request for "
        "which there is none is answered with 503.",
    )
    max_body_bytes: int = Field(
        64 * MEBIBYTE, ge=1, description="Size of the largest body that a request may have."
    )
    otel: str = Field(
        "",
        description="Where stages go as OpenTelemetry spans: the address of an OTLP/HTTP "
        "collector, or the path of a file; nowhere if empty.",
    )
    name: str = Field("server", description="What the spans call this process.")

    @model_validator(mode="after")
    def _engine_reads_settings(self) -> ServerSpec:
        load_engine(self.inference.engine).check_settings(self.inference)
        return self

    @classmethod
    def of(cls, path: str | Path, **values: Any) -> ServerSpec:
        """The spec of a checkpoint with flat `values`, each of which goes to the section that has a
        setting of its name."""
        values["path"] = str(path)
        sections = {
            section: {key: values.pop(key) for key in kind.model_fields if key in values}
            for section, kind in SECTIONS.items()
        }
        return validate_config(cls, {**values, **sections}, "the server's settings")

    def replace(self, **values: Any) -> ServerSpec:
        """A copy with other flat `values`, checked as those of a new one are."""
        flat = self.model_dump()
        return ServerSpec.of(**{**flat.pop("model"), **flat.pop("inference"), **flat, **values})

    def open_store(self) -> MediaStore:
        """The images that requests name."""
        return open_store(
            self.media_roots[0],
            self.media_roots[1:],
            max_bytes=int(self.max_media_gb * 1e9),
            token=resolve_secret(self.media_token, "--media-token"),
            cache_dir=self.media_cache_dir,
            cache_bytes=int(self.media_cache_gb * 1e9),
        )

    def open_blobs(self) -> MediaStore:
        """The parts of files beside those images: weights that are published there."""
        token = resolve_secret(self.media_token, "--media-token")
        return open_blobs(self.media_roots[0], token)

    @property
    def model_path(self) -> Path:
        return Path(self.model.path)

    @property
    def num_threads(self) -> int:
        """Compute threads; one where the setting leaves them to a launcher and there is none, and
        where arithmetic is exact: more would divide sums."""
        return 1 if self.model.exact else self.inference.threads or 1

    @property
    def num_pixel_threads(self) -> int:
        """Threads that decode images; by default half of the cores, to keep up with a device."""
        return self.inference.pixel_threads or max(1, min(8, (os.cpu_count() or 1) // 2))

    @property
    def pixel_cache_bytes(self) -> int:
        return self.inference.pixel_cache_mb * MEBIBYTE

    @property
    def max_waiting_bytes(self) -> int:
        return int(self.max_waiting_mb * MEBIBYTE)


def describe_prefix_reuse(family: Family, keeps_kv: bool = True) -> str:
    """What a turn finds of the one before it, and why."""
    if family.packing.kind == "rows":
        return (
            f"prefix cache: off, each token computes its whole row, because {family.packing.reason}"
        )
    if not keeps_kv:
        return "prefix cache: off, the engine keeps no KV cache between requests"
    line = "prefix cache: on, a turn prefills only what is new since the turn before it"
    if family.packing.carries_state:
        line += (
            ", and all of a prompt that does not go on from there, because the state that layers "
            "carry along a sequence cannot be cut back to what two prompts share"
        )
    return line
