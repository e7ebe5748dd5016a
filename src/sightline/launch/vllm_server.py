"""The command that starts vLLM with our plugin, in the interpreter that has both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sightline.config.secret_refs import resolve_secret
from sightline.errors import ConfigError
from sightline.families import load_family, load_renderer
from sightline.families.registry import load_serving
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin import (
    CONFIG_KEY,
    LOAD_FORMAT,
    LOGITS_PROCESSOR,
    MIDDLEWARE,
    WEIGHT_TRANSFER_BACKEND,
)
from sightline.launch.processes import build_environ, reserve_port
from sightline.media import MediaStore
from sightline.run.parent_death import die_with_parent
from sightline.transport.http_server import check_address

GIBIBYTE = 2**30
VERSION_CHECK = "from sightline.inference.vllm_plugin import check_version; check_version()"
VERSION_CHECK_TIMEOUT_S = 300


def get_vllm_python(name: str) -> str:
    """The interpreter that a setting names; our own for an empty one."""
    found = shutil.which(name) if name else sys.executable
    if found is None:
        raise ConfigError(
            f"[inference] python = {name!r} is no interpreter",
            "name the python of the environment that has vLLM, such as .venv-vllm/bin/python",
        )
    return os.path.abspath(found)


def check_vllm_python(name: str) -> str:
    """The interpreter, which has a vLLM that the plugin knows, and sightline."""
    python = get_vllm_python(name)
    done = subprocess.run(
        [python, "-c", VERSION_CHECK],
        capture_output=True, text=True, timeout=VERSION_CHECK_TIMEOUT_S, check=False,
        env=build_vllm_environ("cpu", 1),
    )  # fmt: skip
    if done.returncode == 0:
        return python
    lines = [line for line in done.stderr.strip().splitlines() if "fix:" not in line]
    last = (lines or [f"ended with {done.returncode}"])[-1]
    raise ConfigError(
        f"{python} cannot serve with vLLM: {last}",
        'build its environment as docs/vllm.md says, or set [inference] engine = "torch"',
    )


def build_vllm_command(spec: ServerSpec, python: str) -> list[str]:
    """The words of the command. vLLM's own console script looks for another distribution."""
    path, inference = spec.model.path, spec.inference
    family = load_family(path, **spec.model.overrides())
    serving = load_serving(path, family, takes_updates=False)
    renderer = load_renderer(path, MediaStore(spec.media_roots[0]), family)
    ours = {"spec": spec.model_dump(mode="json"), "banned": list(renderer.pad_token_ids)}
    words = [python, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", path, "--host", inference.host, "--port", str(inference.port)]
    words += ["--dtype", spec.model.dtype, "--max-model-len", str(inference.max_model_len)]
    words += ["--max-num-seqs", str(inference.max_num_seqs)]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    words += ["--limit-mm-per-prompt", json.dumps(serving.LIMIT_MM_PER_PROMPT)]
    words += ["--mm-processor-cache-gb", f"{spec.pixel_cache_bytes / GIBIBYTE:.6f}"]
    words += ["--weight-transfer-config", json.dumps({"backend": WEIGHT_TRANSFER_BACKEND})]
    words += ["--middleware", MIDDLEWARE, "--logits-processors", LOGITS_PROCESSOR]
    words += ["--additional-config", json.dumps({CONFIG_KEY: ours})]
    words += ["--uvicorn-log-level", "warning", "--disable-fastapi-docs"]
    if serving.HF_OVERRIDES:
        words += ["--hf-overrides", json.dumps(serving.HF_OVERRIDES), "--load-format", LOAD_FORMAT]
    if not spec.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    if runs_on_cpu(inference.device):
        words += ["--enforce-eager", *serving.CPU_ARGUMENTS]
    return words


def has_gpu() -> bool:
    """Whether a driver shows a GPU: one of NVIDIA's, of AMD's, or of the host under WSL."""
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg"))


def runs_on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not has_gpu())


def build_vllm_environ(device: str, threads: int) -> dict[str, str]:
    given = build_environ(threads)
    # Compiling its sampler costs more than half a minute at the first request of a CPU.
    given.setdefault("TORCHDYNAMO_DISABLE", str(int(runs_on_cpu(device))))
    given.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Threads tied to cores would stand in the way of trainer and workers on the same ones.
    given.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return given | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # The logits processor that bans pads is of the first model runner's kind.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def exec_vllm(spec: ServerSpec, python: str) -> None:
    """Turns this process into the server; it keeps its number, its parent and its output.

    What watched for the parent's end in this program is gone then, so the kernel does.
    """
    roots = tuple(root.absolute() for root in spec.media_roots)
    given = {"weights": spec.weights, "weights_root": spec.weights_root}
    paths = {name: path.absolute() for name, path in given.items() if path is not None}
    spec = spec.replace(media_roots=roots, path=str(spec.model_path.absolute()), **paths)
    words = build_vllm_command(spec, python)
    die_with_parent()
    sys.stdout.flush()
    environ = build_vllm_environ(spec.inference.device, spec.num_threads)
    if spec.inference.token:  # vLLM's own routes ask for it, too
        environ["VLLM_API_KEY"] = resolve_secret(spec.inference.token, "--token")
    os.execve(words[0], words, environ)


def serve_vllm(spec: ServerSpec) -> None:
    """Serves with vLLM until SIGTERM or SIGINT. Refuses what cannot work before the model loads."""
    inference = spec.inference
    check_address(inference.host, inference.token, "--token")
    port = reserve_port(inference.host, inference.port, "port")
    exec_vllm(spec.replace(port=port), check_vllm_python(inference.python))
