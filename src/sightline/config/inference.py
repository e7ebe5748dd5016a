"""`[inference]`: how the server samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sightline.config.section import FREE, Section


class Inference(Section):
    engine: Literal["torch", "vllm", "stock_vllm"] = Field(
        "torch",
        description="Which engine serves: the embedded one, vLLM with our plugin, or a vLLM as it "
        "comes, at `servers`.",
    )
    servers: tuple[str, ...] = Field(
        (),
        description="Addresses of servers that run already and see the run's files; none: the run "
        "starts its own.",
        json_schema_extra=FREE,
    )
    sends_images: bool = Field(
        False,
        description="Whether a stock vLLM is sent images as data urls, because it cannot read the "
        "store.",
        json_schema_extra=FREE,
    )
    python: str = Field(
        "", description="Interpreter that has vLLM and sightline; empty is this one.",
        json_schema_extra=FREE,
    )  # fmt: skip
    host: str = Field("127.0.0.1", description="Address to bind.", json_schema_extra=FREE)
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one.", json_schema_extra=FREE)
    device: str = Field("auto", description="cpu, cuda or auto.")
    threads: int = Field(
        0, ge=0, description="Compute threads; 0 shares the cores with the trainer.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_rows: int = Field(
        256, ge=1, description="Sequences in flight or kept for their next turn.",
        json_schema_extra=FREE,
    )  # fmt: skip
    max_len: int = Field(2048, ge=2, description="Longest sequence, prompt and answer.")
    prefill_chunk: int = Field(
        512, ge=1, description="Most prompt tokens of a sequence computed at once.",
        json_schema_extra=FREE,
    )  # fmt: skip
    pixel_cache_mb: int = Field(
        256,
        ge=0,
        description="Processed images kept in memory, by either engine; 0 is off.",
        json_schema_extra=FREE,
    )
    feature_cache_mb: int = Field(
        256, ge=0, description="Vision features kept in memory.", json_schema_extra=FREE
    )
    pixel_threads: int = Field(
        0, ge=0, description="Threads that decode images; 0 follows the cores.",
        json_schema_extra=FREE,
    )  # fmt: skip
    keep_kv_over_updates: bool = Field(
        False,
        description="Whether an answer goes on over keys and values of older weights; it is "
        "prefilled again where not. Tokens sampled so are counted.",
    )

    @model_validator(mode="after")
    def _servers_fit(self) -> Inference:
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"servers has {address!r}: write it as http://HOST:PORT")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("servers names one twice")
        if self.engine == "stock_vllm" and not self.servers:
            raise ValueError(
                'engine = "stock_vllm" needs servers: the run starts none that is not its own'
            )
        if self.sends_images and self.engine != "stock_vllm":
            raise ValueError('sends_images is for engine = "stock_vllm": others take references')
        return self
