"""`[inference]`: how the server samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sightline.config.section import MUTABLE, ConfigSection


class InferenceConfig(ConfigSection):
    engine: Literal["torch", "vllm", "stock_vllm"] = Field(
        "torch",
        description="Which engine serves: the embedded one, vLLM with our plugin, or a vLLM as it "
        "comes, at `servers`.",
    )
    servers: tuple[str, ...] = Field(
        (),
        description="Addresses of servers that run already and see the run's files; none: the run "
        "starts its own.",
        json_schema_extra=MUTABLE,
    )
    inline_images: bool = Field(
        False,
        description="Whether a stock vLLM is sent images as data urls, because it cannot read the "
        "store.",
        json_schema_extra=MUTABLE,
    )
    python: str = Field(
        "",
        description="Interpreter that has vLLM and Sightline; empty is the run's own.",
        json_schema_extra=MUTABLE,
    )
    host: str = Field(
        "127.0.0.1", description="Address that the server binds.", json_schema_extra=MUTABLE
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the server; 0 takes a free one.",
        json_schema_extra=MUTABLE,
    )
    device: str = Field("auto", description="Device of the server: cpu, cuda or auto.")
    threads: int = Field(
        0,
        ge=0,
        description="Compute threads of the server; 0 shares the cores with the trainer.",
        json_schema_extra=MUTABLE,
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        description="Most sequences in flight or kept for their next turn.",
        json_schema_extra=MUTABLE,
    )
    max_model_len: int = Field(
        2048, ge=2, description="Most tokens of a sequence, prompt and answer together."
    )
    prefill_chunk_tokens: int = Field(
        512,
        ge=1,
        description="Most prompt tokens of a sequence that are computed at once.",
        json_schema_extra=MUTABLE,
    )
    pixel_cache_mb: int = Field(
        256,
        ge=0,
        description="Memory for processed images, in either engine; 0 is off.",
        json_schema_extra=MUTABLE,
    )
    feature_cache_mb: int = Field(
        256,
        ge=0,
        description="Memory for features of images, on the server's device.",
        json_schema_extra=MUTABLE,
    )
    pixel_threads: int = Field(
        0,
        ge=0,
        description="Threads that decode images; 0 follows the cores.",
        json_schema_extra=MUTABLE,
    )
    keep_kv_over_updates: bool = Field(
        False,
        description="Whether an answer goes on over a KV cache of older weights, and its tokens are "
        "counted; where not, it is prefilled again.",
    )

    @model_validator(mode="after")
    def _servers_fit(self) -> InferenceConfig:
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"servers has {address!r}: write it as http://HOST:PORT")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("servers names one twice")
        if self.engine == "stock_vllm" and not self.servers:
            raise ValueError(
                'engine = "stock_vllm" needs servers: the run starts none that is not its own'
            )
        if self.inline_images and self.engine != "stock_vllm":
            raise ValueError('inline_images is for engine = "stock_vllm": others take references')
        return self
