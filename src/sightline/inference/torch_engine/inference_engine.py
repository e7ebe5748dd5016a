"""The embedded engine, as shared code sees it."""

from __future__ import annotations

from sightline.compute.weight_transport import WeightTransport
from sightline.families import Family
from sightline.inference.server_spec import ServerSpec, describe_prefix_reuse
from sightline.rollout.engines import InferenceEngine


class TorchInference(InferenceEngine):
    def can_adopt(self, transport: WeightTransport) -> bool:
        return True

    def serve(self, spec: ServerSpec) -> None:
        from sightline.inference.serve import serve
        from sightline.inference.torch_engine.build import build_from_components

        serve(spec, build_from_components)

    def describe(self, family: Family) -> str:
        return describe_prefix_reuse(family)
