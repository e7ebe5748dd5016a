"""`[inference]` of a run file: the engine, and the servers that a run starts or is given."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, model_validator

from sightline.config.secret_refs import InvalidSetting, resolve_secret
from sightline.config.section import ConfigSection, Keywords, Mutable, SecretRef


class InferenceConfig(ConfigSection):
    engine: str = "torch"
    """Engine that samples: torch (embedded), vllm (with our plugin), stock_vllm (without it, at
    `servers`), or one that an installed package provides."""
    servers: Mutable[tuple[str, ...]] = ()
    """Addresses of servers that run already and see the run's files; without any the run starts
    its own."""
    token: Mutable[SecretRef] = ""
    """Where the token is that `servers` ask for: env:NAME or file:PATH. A server that the run
    starts has one of its own."""
    control_token: Mutable[SecretRef] = ""
    """Where the token is with which `servers` are leased and adopt weights; `token` if empty."""
    outage_timeout_s: Mutable[float] = Field(600.0, gt=0)
    """Seconds without any server that is ready after which the run ends."""
    inline_images: Mutable[bool] = False
    """Whether a stock vLLM is sent images as data urls, because it cannot read the store."""
    python: Mutable[str] = ""
    """Python interpreter of the server, which has vLLM and Sightline; empty is the run's own."""
    tensor_parallel_size: Mutable[int] = Field(1, ge=1)
    """Devices that hold a part of every matrix each, of a vLLM that the run starts."""
    data_parallel_size: Mutable[int] = Field(1, ge=1)
    """Copies of the model that share the requests of a vLLM that the run starts."""
    gpu_memory_utilization: Mutable[float] = Field(0.0, ge=0, le=1)
    """Share of a GPU's memory for a server that the run starts: weights, keys and values. 0 is 0.3
    for the servers of a run whose trainer has the same GPU, together, and else 0.9."""
    engine_args: Mutable[Keywords] = {}
    """Further options of an engine that the run starts. For vLLM they are its command-line options
    without the leading dashes, such as `enable_expert_parallel = true`."""
    host: Mutable[str] = "127.0.0.1"
    """Address that the server binds."""
    tls_cert: Mutable[str] = ""
    """PEM file of the certificate of the server that the run starts, whose address is then https;
    on the machine of the server."""
    tls_key: Mutable[str] = ""
    """PEM file of the key of `tls_cert`."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the server; 0 takes a free one."""
    device: str = "auto"
    """Device of the server: cpu, cuda or auto."""
    threads: Mutable[int] = Field(0, ge=0)
    """Compute threads of the server; 0 shares the cores with the trainer."""
    max_num_seqs: Mutable[int] = Field(256, ge=1)
    """Most sequences that are in flight, or whose KV cache is kept for the next turn."""
    max_model_len: Mutable[int] = Field(2048, ge=2)
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
                host = address if "://" not in address and "@" not in address else "HOST:PORT"
                raise InvalidSetting(
                    "servers has an address without http://", f"write it as http://{host}"
                )
            if "@" in urlsplit(address).netloc:
                raise InvalidSetting(
                    "servers has an address with a password in it",
                    "name where the token is in [inference] token",
                )
        if len(set(self.servers)) < len(self.servers):
            raise InvalidSetting("servers names one twice", "name each once")
        return self

    @property
    def scheme(self) -> str:
        """Of the servers that the run starts."""
        return "https" if self.tls_cert else "http"

    def read_token(self, own: str = "") -> str:
        """What the servers that are sampled from ask for; a run's own ask for `own`."""
        return self.read_added_token() if self.servers else own

    def read_added_token(self) -> str:
        """What servers ask for that the run did not start."""
        return resolve_secret(self.token, "[inference] token")

    def read_control_token(self) -> str:
        """What those servers ask for before they take weights."""
        name = "control_token" if self.control_token else "token"
        return resolve_secret(getattr(self, name), f"[inference] {name}")
