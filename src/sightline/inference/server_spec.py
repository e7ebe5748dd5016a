"""Settings of a server process: the run file's `[model]` and `[inference]`, and its own.

A run passes these two sections. `sightline serve` builds them from its options, which have the
names of the settings.
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
        ..., min_length=1, description="Roots of the store, folders or addresses, in search order."
    )
    media_token: SecretRef = Field(
        "", description="Token of the media service: env:NAME or file:PATH."
    )
    media_cache_dir: str = Field(
        "",
        description="Folder that caches images of a remote store; ~/.cache/sightline/media if "
        "empty.",
    )
    media_cache_gb: float = Field(10.0, ge=0, description="Maximum size of that folder in GB.")
    max_media_gb: float = Field(
        50.0,
        gt=0,
        description="Maximum GB of the first store root. A chat request whose images exceed it, "
        "or leave less than 1 GiB on the disk, gets status 507.",
    )
    weights: Path | None = Field(
        None, description="Manifest of the first weights, instead of the checkpoint's."
    )
    weights_root: Path | None = Field(
        None,
        description="Folder from which weights may be adopted, such as the folder of the runs that "
        "use this server. Without it the server adopts no weights from files.",
    )
    run_id: str = Field("", description="Id of the run that starts the server.")
    enable_prefix_caching: bool = Field(
        True, description="Whether a finished sequence keeps its KV cache for the next turn."
    )
    max_waiting: int = Field(
        4096, ge=0, description="Maximum number of waiting requests. More get status 503."
    )
    max_waiting_mb: float = Field(
        4096,
        ge=0,
        description="MB for the prompts and decoded images of waiting requests. A request that "
        "exceeds it gets status 503.",
    )

    @model_validator(mode="after")
    def _engine_reads_settings(self) -> ServerSpec:
        load_engine(self.inference.engine).check_settings(self.inference)
        return self

    @classmethod
    def of(cls, path: str | Path, **values: Any) -> ServerSpec:
        """Build a checkpoint's spec from flat `values`, each of which goes to its section."""
        values["path"] = str(path)
        sections = {
            section: {key: values.pop(key) for key in kind.model_fields if key in values}
            for section, kind in SECTIONS.items()
        }
        return validate_config(cls, {**values, **sections}, "the server's settings")

    def replace(self, **values: Any) -> ServerSpec:
        """Return a validated copy with the flat `values` changed."""
        flat = self.model_dump()
        return ServerSpec.of(**{**flat.pop("model"), **flat.pop("inference"), **flat, **values})

    def open_store(self) -> MediaStore:
        return open_store(
            self.media_roots[0],
            self.media_roots[1:],
            max_bytes=int(self.max_media_gb * 1e9),
            token=resolve_secret(self.media_token, "--media-token"),
            cache_dir=self.media_cache_dir,
            cache_bytes=int(self.media_cache_gb * 1e9),
        )

    def open_blobs(self) -> MediaStore:
        """Open the part of the store that holds published weights."""
        token = resolve_secret(self.media_token, "--media-token")
        return open_blobs(self.media_roots[0], token)

    @property
    def model_path(self) -> Path:
        return Path(self.model.path)

    @property
    def num_threads(self) -> int:
        """Number of compute threads; 1 in exact mode, because more threads would split sums."""
        return 1 if self.model.exact else self.inference.threads or 1

    @property
    def num_pixel_threads(self) -> int:
        """Number of threads that decode images. By default half the cores, at most 8."""
        return self.inference.pixel_threads or max(1, min(8, (os.cpu_count() or 1) // 2))

    @property
    def pixel_cache_bytes(self) -> int:
        return self.inference.pixel_cache_mb * MEBIBYTE


def describe_prefix_reuse(family: Family, keeps_kv: bool = True) -> str:
    """Describe which computation a turn reuses from the previous turn, and why."""
    if family.packing.kind == "rows":
        reason = family.packing.reason
        return f"prefix cache: off, each token recomputes its sequence, because {reason}"
    if not keeps_kv:
        return "prefix cache: off, the engine keeps no KV cache between requests"
    line = "prefix cache: on, a turn prefills only what the turn before it did not compute"
    if family.packing.carries_state:
        line += (
            ". A prompt that does not continue the last turn is prefilled from the start, because "
            "the recurrent state cannot be rewound to a shared prefix"
        )
    return line
