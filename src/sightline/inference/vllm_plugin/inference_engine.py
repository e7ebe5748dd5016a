"""vLLM with our plugin, as shared code sees it."""

from __future__ import annotations

from pathlib import Path

from sightline.config import InferenceConfig, RunFile
from sightline.errors import ConfigError
from sightline.families import Family
from sightline.families.checkpoint_files import read_shapes
from sightline.families.registry import load_serving
from sightline.inference.server_spec import ServerSpec
from sightline.inference.vllm_plugin.command import check_python, exec_vllm, find_python
from sightline.rollout.engines import InferenceEngine


class VllmInference(InferenceEngine):
    settings = frozenset({"python", "tensor_parallel_size", "data_parallel_size", "engine_args"})
    inexact_reason = "vLLM's order of summation changes with the batch"

    def serve(self, spec: ServerSpec) -> None:
        exec_vllm(spec)

    def find_python(self, inference: InferenceConfig) -> str:
        return find_python(inference.python)

    def check(self, config: RunFile, family: Family) -> None:
        super().check(config, family)
        model = Path(config.model.path)
        serving = load_serving(model, family)
        if config.lora.publish == "adapter" and family.shows_media:
            vision = serving.vision_prefixes(family)
            if not any(name.startswith(vision) for name in read_shapes(model)):
                raise ConfigError(
                    f'[lora] publish = "adapter": vLLM cannot merge adapters into {model}, whose '
                    f"parameter names differ from the trainer's ({vision[0]}...)",
                    'set publish = "merged"',
                )
        is_elsewhere = bool(config.inference.servers) or config.launch.is_elsewhere("server")
        if not is_elsewhere or config.eval.every:
            check_python(config.inference.python)
