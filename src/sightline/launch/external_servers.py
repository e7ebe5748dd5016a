"""Servers that run already: what can be asked of them before a run leans on them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from sightline.config import RunFile
from sightline.errors import ConfigError
from sightline.families import Family

HTTP_TIMEOUT_S = 10.0
STOCK_VERSION = "0.32."
"""The version of vLLM whose routes `rollout.stock_vllm_client` knows."""


def check_external_servers(config: RunFile, family: Family) -> None:
    """Refuses one of `[inference] servers` that does not answer, or would not serve this run as it
    expects."""
    if not config.inference.servers:
        return
    if not config.media.root:
        raise ConfigError(
            "[inference] servers without [media] root: they could not find the run's images",
            "set it to the folder that the servers were started with",
        )
    if config.trainer.publish == "broadcast":
        raise ConfigError(
            '[trainer] publish = "broadcast" with [inference] servers, which take files',
            'set publish = "files"',
        )
    for address in config.inference.servers:
        if config.inference.engine == "stock_vllm":
            _check_stock_vllm(address)
        else:
            _check_sightline_server(config, family, address)
    if config.inference.engine == "stock_vllm" and config.lora.publish == "adapter":
        raise ConfigError(
            '[lora] publish = "adapter" with engine = "stock_vllm", which loads whole weights',
            'set publish = "merged"',
        )
    if config.inference.engine == "stock_vllm" and not config.media.allow_unverified_pixels:
        raise ConfigError(
            '[inference] engine = "stock_vllm" gives no digests of the pixels that it saw, and '
            "[media] allow_unverified_pixels is false: no sample with an image would be trained on",
            'set allow_unverified_pixels = true, or serve with engine = "vllm", which proves them',
        )


def _check_sightline_server(config: RunFile, family: Family, address: str) -> None:
    health = _get_json(address, "/health")
    if not isinstance(health, dict) or "fingerprint" not in health:
        raise ConfigError(
            f"[inference] servers: {address} is no server of sightline's",
            'start it with `sightline serve`, or set engine = "stock_vllm"',
        )
    for name, ours in (("fingerprint", family.fingerprint), ("engine", config.inference.engine)):
        if health[name] != ours:
            raise ConfigError(
                f"[inference] servers: {address} has {name} {health[name]!r}, the run {ours!r}"
                + (f"; its settings are {health['settings']}" if name == "fingerprint" else ""),
                "serve the checkpoint of [model] path with the same settings, or change the run's",
            )
    if health["max_model_len"] < config.inference.max_model_len:
        raise ConfigError(
            f"[inference] servers: {address} takes {health['max_model_len']} tokens, the run has "
            f"max_model_len = {config.inference.max_model_len}",
            "start it with a larger --max-model-len, or lower max_model_len",
        )


def _check_stock_vllm(address: str) -> None:
    version = str(_get_json(address, "/version").get("version", ""))
    if not version.startswith(STOCK_VERSION):
        raise ConfigError(
            f"[inference] servers: {address} says that it is vLLM {version or 'of no version'}",
            f"serve with vLLM {STOCK_VERSION}x, whose routes are known here",
        )
    if "weight_version" not in _get_json(address, "/weight_info"):
        raise ConfigError(
            f"[inference] servers: the vLLM at {address} cannot take new weights",
            "start it with VLLM_SERVER_DEV_MODE=1",
        )


def _get_json(address: str, path: str) -> dict[str, Any]:
    """The JSON object that is answered; an empty one for a refusal, and for anything else."""
    try:
        with urllib.request.urlopen(address + path, timeout=HTTP_TIMEOUT_S) as answer:
            found = json.loads(answer.read())
            return found if isinstance(found, dict) else {}
    except (urllib.error.HTTPError, ValueError):
        return {}
    except OSError as error:
        raise ConfigError(
            f"[inference] servers: {address} does not answer: {error}",
            "start it first, or correct the address",
        ) from error
