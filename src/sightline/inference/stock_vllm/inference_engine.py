"""A vLLM without our plugin, as shared code sees it."""

from __future__ import annotations

from typing import Any

from sightline.compute.weight_transport import WeightTransport
from sightline.config import InferenceConfig, RunFile
from sightline.errors import ConfigError
from sightline.families import Family
from sightline.inference.server_spec import ServerSpec
from sightline.inference.stock_vllm.client import StockVLLMClient
from sightline.media import MediaStore, is_address
from sightline.rollout.engines import FetchJson, InferenceEngine

SUPPORTED_VERSION = "0.32."
"""The version of vLLM whose routes `StockVLLMClient` knows."""


class StockVllmInference(InferenceEngine):
    settings = frozenset({"inline_images"})
    inexact_reason = "vLLM's order of summation changes with the batch"
    can_start = False
    takes_leases = False

    def can_adopt(self, transport: WeightTransport) -> bool:
        return transport.has_files and not transport.sends_manifest

    def serve(self, spec: ServerSpec) -> None:
        raise ConfigError(
            f"Sightline cannot start engine {self.name!r}",
            'start the vLLM server yourself, or serve with engine = "vllm"',
        )

    def check(self, config: RunFile, family: Family) -> None:
        super().check(config, family)
        if is_address(config.media.root) and not config.inference.inline_images:
            raise ConfigError(
                f"[inference] engine = {self.name!r} reads images as files, and [media] root is "
                f"{config.media.root}",
                "set [inference] inline_images = true",
            )
        if config.lora.publish == "adapter":
            raise ConfigError(
                f'[lora] publish = "adapter" does not work with engine = {self.name!r}, which '
                "loads whole weights",
                'set [lora] publish = "merged"',
            )
        if not config.media.allow_unverified_pixels:
            raise ConfigError(
                f"[inference] engine = {self.name!r} returns no pixel digests, and [media] "
                "allow_unverified_pixels is false: no sample with an image would train",
                'set allow_unverified_pixels = true, or serve with engine = "vllm"',
            )

    def check_server(self, config: RunFile, family: Family, address: str, fetch: FetchJson) -> None:
        version = str(fetch("/version").get("version", ""))
        if not version.startswith(SUPPORTED_VERSION):
            software = f"vLLM {version}" if version else "no vLLM"
            raise ConfigError(
                f"[inference] servers: {address} runs {software}",
                f"serve with vLLM {SUPPORTED_VERSION}x, whose routes Sightline knows",
            )
        if "weight_version" not in fetch("/weight_info"):
            raise ConfigError(
                f"[inference] servers: the vLLM at {address} cannot take new weights",
                "start it with VLLM_SERVER_DEV_MODE=1",
            )

    def describe(self, family: Family) -> str:
        return (
            "weights: another run can change the weights of this vLLM; every answer carries their "
            "label, and the run ends if it is not its own"
        )

    def build_client(
        self, url: str, inference: InferenceConfig, store: MediaStore, **options: Any
    ) -> StockVLLMClient:
        options.pop("settings", None)  # this server has no processor settings to compare
        shares_store = not inference.inline_images
        return StockVLLMClient(url, store=store, shares_store=shares_store, **options)
