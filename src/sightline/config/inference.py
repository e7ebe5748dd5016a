"""`[inference]`: how the server samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sightline.config.section import ConfigSection, Mutable


class InferenceConfig(ConfigSection):
    engine: Literal["torch", "vllm", "stock_vllm"] = "torch"
    """Engine that samples: torch (embedded), vllm (with our plugin), or stock_vllm (a vLLM as it
    comes, at `servers`)."""
    servers: Mutable[tuple[str, ...]] = ()
    """Addresses of servers that run already and see the run's files; without any the run starts
    its own."""
    inline_images: Mutable[bool] = False
    """Whether a stock vLLM is sent images as data urls, because it cannot read the store."""
    python: Mutable[str] = ""
    """Python interpreter of the server, which has vLLM and Sightline; empty is the run's own."""
    host: Mutable[str] = "127.0.0.1"
    """Address that the server binds."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the server; 0 takes a free one."""
    device: str = "auto"
    """Device of the server: cpu, cuda or auto."""
    threads: Mutable[int] = Field(0, ge=0)
    """Compute threads of the server; 0 shares the cores with the trainer."""
    max_num_seqs: Mutable[int] = Field(256, ge=1)
    """Most sequences that are in flight, or whose KV cache is kept for the next turn."""
    max_model_len: int = Field(2048, ge=2)
    """Most tokens of a sequence, prompt and answer together."""
    prefill_chunk_tokens: Mutable[int] = Field(512, ge=1)
    """Most prompt tokens of a sequence that one prefill step computes."""
    pixel_cache_mb: Mutable[int] = Field(256, ge=0)
    """MB of memory for the patches of images, in either engine; 0 is off."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """MB on the server's device for the features of images."""
    pixel_threads: Mutable[int] = Field(0, ge=0)
    """Number of threads that decode images; 0 follows the cores."""
    keep_kv_over_updates: bool = False
    """Whether a sequence keeps its KV cache when weights change, and its off-policy tokens are
    counted; where not, it is prefilled again."""

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
