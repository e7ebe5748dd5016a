"""The command that starts vLLM with our plugin, and the checks of its Python interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sightline.bounded_child import die_with_parent
from sightline.config import RunFile
from sightline.config.secret_refs import resolve_secret
from sightline.errors import ConfigError
from sightline.families import Family, load_family, load_renderer
from sightline.families.registry import load_serving
from sightline.inference import vllm_plugin as plugin
from sightline.inference.server_spec import ServerSpec
from sightline.media import is_address
from sightline.rollout.engines import InferenceEngine
from sightline.run.machine import build_environ, runs_on_cpu
from sightline.transport.http_server import check_address
from sightline.transport.listen import bind_socket, check_tls

GIBIBYTE = 2**30
VERSION_CHECK = "from sightline.inference.vllm_plugin import check_version; check_version()"
VERSION_CHECK_TIMEOUT_S = 300


def find_python(name: str) -> str:
    """Return the path of the interpreter `name`, or of the current one if it is empty."""
    path = shutil.which(name) if name else sys.executable
    if path is None:
        fix = "set it to the python of an environment with vLLM, such as .venv-vllm/bin/python"
        raise ConfigError(f"[inference] python = {name!r} is not an interpreter", fix)
    return os.path.abspath(path)


def check_python(name: str) -> str:
    """Return the interpreter's path, or raise if it has no Sightline or no supported vLLM."""
    python = find_python(name)
    done = subprocess.run(
        [python, "-c", VERSION_CHECK],
        capture_output=True, text=True, timeout=VERSION_CHECK_TIMEOUT_S, check=False,
        env=build_vllm_environ("cpu", 1),
    )  # fmt: skip
    if done.returncode == 0:
        return python
    lines = [line for line in done.stderr.strip().splitlines() if "fix:" not in line]
    last = (lines or [f"exit code {done.returncode}"])[-1]
    fix = 'build its environment as docs/vllm.md says, or set [inference] engine = "torch"'
    raise ConfigError(f"{python} cannot serve with vLLM: {last}", fix)


def build_vllm_command(spec: ServerSpec, python: str) -> list[str]:
    """Return the command line. vLLM's console script expects another distribution."""
    path, inference = spec.model.path, spec.inference
    family = load_family(path, **spec.model.overrides())
    serving = load_serving(path, family, takes_updates=False)
    is_on_cpu, dtype = runs_on_cpu(inference.device), spec.model.dtype
    if is_on_cpu:
        serving.check_cpu(family, dtype)
    renderer = load_renderer(path, spec.open_store(), family)
    plugin_config = {"spec": spec.model_dump(mode="json"), "banned": list(renderer.pad_token_ids)}
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", path, "--host", inference.host, "--port", str(inference.port)]
    argv += ["--dtype", dtype, "--max-model-len", str(inference.max_model_len)]
    argv += ["--max-num-seqs", str(inference.max_num_seqs)]
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--limit-mm-per-prompt", json.dumps(serving.LIMIT_MM_PER_PROMPT)]
    argv += ["--mm-processor-cache-gb", f"{spec.pixel_cache_bytes / GIBIBYTE:.6f}"]
    argv += ["--weight-transfer-config", json.dumps({"backend": plugin.WEIGHT_TRANSFER_BACKEND})]
    argv += ["--middleware", plugin.MIDDLEWARE, "--logits-processors", plugin.LOGITS_PROCESSOR]
    argv += ["--additional-config", json.dumps({plugin.CONFIG_KEY: plugin_config})]
    argv += ["--uvicorn-log-level", "warning", "--disable-fastapi-docs"]
    argv += serving.arguments(family)
    if inference.tls_cert:
        argv += ["--ssl-certfile", inference.tls_cert, "--ssl-keyfile", inference.tls_key]
    if serving.HF_OVERRIDES:
        argv += ["--hf-overrides", json.dumps(serving.HF_OVERRIDES)]
    if serving.MAPS_CHECKPOINT:
        argv += ["--load-format", plugin.LOAD_FORMAT]
    if not spec.enable_prefix_caching:
        argv.append("--no-enable-prefix-caching")
    if is_on_cpu:
        argv += ["--enforce-eager", *serving.CPU_ARGUMENTS]
    argv += ["--tensor-parallel-size", str(inference.tensor_parallel_size)]
    argv += ["--data-parallel-size", str(inference.data_parallel_size)]
    if inference.gpu_memory_utilization:
        argv += ["--gpu-memory-utilization", str(inference.gpu_memory_utilization)]
    return argv + build_extra_options(inference.engine_args, argv)


def build_extra_options(args: Mapping[str, Any], argv: Sequence[str]) -> list[str]:
    """Convert `[inference] engine_args` to options. Raise if Sightline already sets one."""
    extra: list[str] = []
    for name, value in args.items():
        option = f"--{name.replace('_', '-').lstrip('-')}"
        if option in argv or f"--no-{option[2:]}" in argv:
            problem = f"[inference] engine_args has {name}, but Sightline sets {option}"
            fix = "remove it, and look for a setting of [inference] or [model] instead"
            raise ConfigError(problem, fix)
        if isinstance(value, bool):
            extra.append(option if value else f"--no-{option[2:]}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            extra += [option, text]
    return extra


def build_vllm_environ(device: str, threads: int) -> dict[str, str]:
    environ = build_environ(threads)
    if runs_on_cpu(device):  # shards on one machine connect to this address
        environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    # Compiling the sampler delays the first request on a CPU by more than half a minute.
    environ.setdefault("TORCHDYNAMO_DISABLE", str(int(runs_on_cpu(device))))
    environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Threads bound to cores would compete with the trainer and workers.
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environ | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # Our logits processor requires the V1 model runner.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def exec_vllm(spec: ServerSpec) -> None:
    """Replace this process with the server, which keeps its process id, parent and output.

    Invalid settings raise before the model loads. A thread that watches the parent would not
    survive the replacement, so the kernel kills the server when its parent dies.
    """
    inference = spec.inference
    check_address(inference.host, inference.token, "--token")
    check_tls(inference.tls_cert, inference.tls_key, inference.host)
    python = check_python(inference.python)
    # The socket stays bound until `execve` closes it, so that no other process gets the port.
    listening = bind_socket(inference.host, inference.port)
    roots = [r if is_address(r) else str(Path(r).absolute()) for r in spec.media_roots]
    folders = {"weights": spec.weights, "weights_root": spec.weights_root}
    paths = {name: path.absolute() for name, path in folders.items() if path is not None}
    path, port = str(spec.model_path.absolute()), listening.getsockname()[1]
    spec = spec.replace(port=port, media_roots=roots, path=path, **paths)
    argv = build_vllm_command(spec, python)
    die_with_parent()
    sys.stdout.flush()
    environ = build_vllm_environ(inference.device, spec.num_threads)
    if inference.token:  # vLLM's own routes also require it
        environ["VLLM_API_KEY"] = resolve_secret(inference.token, "--token")
    os.execve(argv[0], argv, environ)


class VllmInference(InferenceEngine):
    settings = frozenset({"python", "tensor_parallel_size", "data_parallel_size", "engine_args"})
    inexact_reason = "vLLM's order of summation changes with the batch"

    def serve(self, spec: ServerSpec) -> None:
        exec_vllm(spec)

    def takes_adapters(self, has_plain_names: bool) -> bool:
        return has_plain_names

    def check(self, config: RunFile, family: Family) -> None:
        super().check(config, family)
        load_serving(Path(config.model.path), family)  # raises for families that vLLM cannot serve
        is_elsewhere = bool(config.inference.servers) or config.launch.is_elsewhere("server")
        if not is_elsewhere or config.eval.every:
            check_python(config.inference.python)
