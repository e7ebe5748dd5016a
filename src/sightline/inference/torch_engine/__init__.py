"""The embedded engine: continuous batching on plain torch, CPU or CUDA.

build             constructs the engine: device, model, memory, first weights
engine            the loop on its thread: schedule, execute, update
scheduler         assigns rows to requests, waits for pixels, finishes requests
model_runner      one step on the device: encode images, forward, sample, score prompts
recurrent_runner  one step for models with recurrent layers
policy_weights    the weights in use: the checkpoint's, with adapters next to their matrices
observer          counters, and where the engine's time goes
decode            decode steps of fixed shape, replayed as CUDA graphs
row_table         requests, one row per sequence as arrays, and the plan of a step
prefix_cache      finds finished rows to continue, and rows that hold a prompt
kv_cache          keys and values in pages that rows may share, and their attention
sampling          logits to tokens and their logprobs
"""

from __future__ import annotations

from sightline.compute.weight_transport import WeightTransport
from sightline.families import Family
from sightline.inference.server_spec import ServerSpec, describe_prefix_reuse
from sightline.rollout.engines import InferenceEngine


class TorchInference(InferenceEngine):
    reports_routes = True

    def can_adopt(self, transport: WeightTransport) -> bool:
        return True

    def takes_adapters(self, has_plain_names: bool) -> bool:
        return True

    def serve(self, spec: ServerSpec) -> None:
        from sightline.inference.serve import serve
        from sightline.inference.torch_engine.build import build_from_components

        serve(spec, build_from_components)

    def describe(self, family: Family) -> str:
        return describe_prefix_reuse(family)
