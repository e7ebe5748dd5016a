"""Tensor parallelism: the ranks of a group divide the matrices of attention and MLPs.

    hidden states --columns--> this rank's heads or intermediate values --rows--> a part of each
    output --all-reduce--> outputs

A family's plan names the modules of a decoder layer, and their matrices that are divided by
columns or by rows. Other parameters of these modules, such as norms of heads, are on every rank.
The ranks of a group have the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from sightline.errors import ConfigError
from sightline.families.protocol import Division, TensorPlan


def divide_layer(layer: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the modules of `plan` that a layer has, in place, and return them."""
    modules = {name: module for name, module in layer.named_modules() if name in plan}
    units = {
        name: module
        for name, module in modules.items()
        if any(getattr(module, matrix, None) is not None for matrix in plan[name])
    }
    for name, module in units.items():
        _divide_module(module, plan[name], mesh)
    return list(units.values())


def _divide_module(module: nn.Module, plan: Mapping[str, Division], mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    for name, part in module.named_modules():
        division = plan.get(name)
        dim = {"columns": 0, "rows": 1}.get(division or "")
        for parameter in part.parameters(recurse=False) if dim is not None else ():
            if parameter.ndim <= cast(int, dim) or parameter.shape[cast(int, dim)] % mesh.size():
                shape, size = tuple(parameter.shape), mesh.size()
                what = f"{type(module).__name__}.{name} has a parameter of shape {shape}"
                problem = f"{what}, which {size} ranks cannot divide by {division}"
                raise ConfigError(problem, "set [trainer] tensor_parallel = 1")
        divide_parameters(part, mesh, Replicate() if dim is None else Shard(dim))
        if next(part.parameters(recurse=False), None) is not None:
            part.forward = partial(_compute, part, division, group)
    module.register_forward_pre_hook(partial(_copy_input, group), with_kwargs=True)


def _compute(
    part: nn.Module, division: Division | None, group: dist.ProcessGroup, *args: Any
) -> Tensor:
    """Return the output of a part with its local parameters."""
    # Each rank's gradient of a parameter that all have comes from its own heads.
    local = LocalModule(part, gradients=None if division else [Partial()])
    out: Tensor = type(part).forward(cast(Any, local), *args)
    return _SumOutputs.apply(out, group) if division == "rows" else out


def _copy_input(
    group: dist.ProcessGroup, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the gradient of a module's input a sum over the ranks, which compute parts."""
    if args:
        return (_SumGradients.apply(args[0], group), *args[1:]), options
    hidden = _SumGradients.apply(options["hidden_states"], group)
    return args, options | {"hidden_states": hidden}


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


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
