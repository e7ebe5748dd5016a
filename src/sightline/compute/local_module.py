"""A module of which each rank computes a part, with its parts of DTensor parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor


class LocalModule:
    """A module with this rank's parts of its parameters, and with other `attributes`.

    The parameters' gradients have the placements `gradients`, by default those of the parameters,
    and are multiplied by `gradient_scale`.
    """

    def __init__(
        self,
        module: nn.Module,
        gradients: Sequence[Placement] | None = None,
        gradient_scale: float = 1.0,
        **attributes: Any,
    ) -> None:
        self._module = module
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor)
            local = parameter.to_local(grad_placements=gradients)
            if gradient_scale != 1 and local.requires_grad:
                local.register_hook(lambda gradient: gradient * gradient_scale)
            setattr(self, name, local)
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def divide_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace a module's own parameters by DTensors. Every rank has the same values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))
