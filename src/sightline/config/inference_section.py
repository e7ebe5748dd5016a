"""The section `[inference]` of a run file: the engine and its servers."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, model_validator

from sightline.config.secret_refs import InvalidSetting, resolve_secret
from sightline.config.section import ConfigSection, Device, Keywords, Mutable, SecretRef


class InferenceConfig(ConfigSection):
    engine: str = "torch"
    """Inference engine: torch (embedded), vllm, or one from an installed package."""
    servers: Mutable[tuple[str, ...]] = ()
    """URLs of running servers that can read the run's files. Without any, the run starts its
    own."""
    token: Mutable[SecretRef] = ""
    """Reference to the token of `servers`: env:NAME or file:PATH. A server that the run starts gets
    a token of its own."""
    control_token: Mutable[SecretRef] = ""
    """Reference to the token that allows leasing `servers` and updating their weights. Empty uses
    `token`."""
    outage_timeout_s: Mutable[float] = Field(600.0, gt=0)
    """Seconds without any ready server after which the run ends."""
    python: Mutable[str] = ""
    """Python interpreter of the server, with vLLM and Sightline installed. Empty uses the run's
    own."""
    tensor_parallel_size: Mutable[int] = Field(1, ge=1)
    """Number of devices that share each matrix in a vLLM that the run starts."""
    data_parallel_size: Mutable[int] = Field(1, ge=1)
    """Number of model copies that share the requests in a vLLM that the run starts."""
    gpu_memory_utilization: Mutable[float] = Field(0.0, ge=0, le=1)
    """Fraction of the GPU's memory for weights and KV cache of a server that the run starts. 0
    means 0.9, or 0.3 for all servers together if the trainer uses the same GPU."""
    engine_args: Mutable[Keywords] = {}
    """More options for an engine that the run starts. For vLLM these are its command-line options
    without the leading dashes, such as `enable_expert_parallel = true`."""
    host: Mutable[str] = "127.0.0.1"
    """Address that the server binds to."""
    tls_cert: Mutable[str] = ""
    """PEM file of the TLS certificate for a server that the run starts, on the server's machine.
    Its URL is then https."""
    tls_key: Mutable[str] = ""
    """PEM file of the private key of `tls_cert`."""
    port: Mutable[int] = Field(0, ge=0, le=65535)
    """Port of the server. 0 chooses a free one."""
    device: Device = "auto"
    """Device of the server: cpu, cuda or auto."""
    threads: Mutable[int] = Field(0, ge=0)
    """Number of compute threads of the server. 0 shares the cores with the trainer."""
    max_num_seqs: Mutable[int] = Field(256, ge=1)
    """Maximum number of sequences in flight, including those whose KV cache is kept for their next
    turn."""
    max_model_len: Mutable[int] = Field(2048, ge=2)
    """Maximum number of tokens per sequence, prompt and answer together."""
    prefill_chunk_tokens: Mutable[int] = Field(512, ge=1)
    """Maximum number of prompt tokens per sequence that one prefill step computes."""
    pixel_cache_mb: Mutable[int] = Field(256, ge=0)
    """Memory in MB for image patches, in either engine. 0 turns the cache off."""
    feature_cache_mb: Mutable[int] = Field(256, ge=0)
    """Memory in MB on the server's device for image features."""
    pixel_threads: Mutable[int] = Field(0, ge=0)
    """Number of threads that decode images. 0 chooses by CPU cores."""
    keep_kv_over_updates: bool = False
    """Whether sequences keep their KV cache when weights change; their off-policy tokens are then
    counted. If false, they are prefilled again."""

    @model_validator(mode="after")
    def _check_servers(self) -> InferenceConfig:
        for address in self.servers:
            if not address.startswith(("http://", "https://")):
                host = address if "://" not in address and "@" not in address else "HOST:PORT"
                raise InvalidSetting("servers has a URL without http://", f"write http://{host}")
            if "@" in urlsplit(address).netloc:
                raise InvalidSetting(
                    "servers has a URL with a password",
                    "remove it, and set [inference] token to env:NAME or file:PATH",
                )
        if len(set(self.servers)) < len(self.servers):
            raise InvalidSetting("servers lists a server twice", "list each server once")
        return self

    @property
    def scheme(self) -> str:
        """The URL scheme of servers that the run starts."""
        return "https" if self.tls_cert else "http"

    def read_token(self, own: str = "") -> str:
        """Return the token of the servers; `own` is that of servers that the run starts."""
        return self.read_added_token() if self.servers else own

    def read_added_token(self) -> str:
        """Return the token of servers that the run did not start."""
        return resolve_secret(self.token, "[inference] token")

    def read_control_token(self) -> str:
        """Return the token with which those servers accept weights."""
        name = "control_token" if self.control_token else "token"
        return resolve_secret(getattr(self, name), f"[inference] {name}")
