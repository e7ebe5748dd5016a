"""Layers with experts: their computation, and which experts compute each token.

Rounding in a sampler and in a trainer can lead to different experts, and so to different logprobs.
A sampler therefore records its tokens' experts, the *routes*, and the trainer replays them. The
experts' weights come from the trainer's own scores, so the router trains.

Dimensions: T tokens, L layers of the text model (dense ones have zeros), K experts of a token.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from functools import cache
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from sightline.errors import FamilyError, Misaligned

Routes = Integer[Tensor, "tokens layers experts"]
Choice = Integer[Tensor, "tokens experts"]
GROUPED = "grouped_mm"


def group_experts(model: nn.Module) -> None:
    """Make all experts of a layer compute in two grouped products, in sampler and trainer.

    transformers falls back to a loop over the experts without an error.
    """
    for experts in find_experts(model):
        cast(Any, experts).config._experts_implementation = GROUPED


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold all experts of a layer."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def check_auxiliary_loss(config: Any) -> None:
    """Raise if the checkpoint asks for a load-balancing loss, which our trainer does not add."""
    coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    if getattr(config, "output_router_logits", False) and coefficient:
        raise FamilyError(
            "config.json sets output_router_logits, which adds an auxiliary loss with "
            f"router_aux_loss_coef = {coefficient}. Sightline trains without it",
            "set output_router_logits to false in config.json",
        )


class ExpertRouting:
    """Records the routes of the last forward pass of a model, and replays given ones."""

    def __init__(self, layers: list[Any]) -> None:
        routers = {i: r for i, layer in enumerate(layers) if (r := _find_router(layer)) is not None}
        first = next(iter(routers.values()))
        self.num_layers, self.num_experts, self.top_k = len(layers), first.num_experts, first.top_k
        self.dtype = torch.uint8 if self.num_experts < 256 else torch.int16
        self.no_route = torch.iinfo(self.dtype).max
        self._recorded: dict[int, Choice] = {}
        self._given: Routes | None = None
        self._replays = False
        key = next(_keys)
        _routings[key] = self
        for layer, router in routers.items():
            router.__class__ = _build_replaying(cast(Hashable, type(router)))
            router.routing, router.route_key, router.route_layer = self, key, layer
            # A compiler would build a graph for each number, but not for each tensor.
            router.compiled_layer = torch.tensor(layer)

    @classmethod
    def find(cls, text: Any) -> ExpertRouting | None:
        """Return the routing of a text model. None if it has no experts, or a router that `weigh`
        does not know."""
        layers = list(text.layers)
        routers = {type(r): r for layer in layers if (r := _find_router(layer)) is not None}
        return cls(layers) if routers and all(map(_is_known, routers.values())) else None

    def use(self, routes: Routes | None, replays: bool) -> None:
        """Compare the next forward pass with `routes`, and replay them if `replays`.

        The routes stay in use for the backward pass, which may compute layers again.
        """
        if routes is not None and (
            routes.shape[1:] != (self.num_layers, self.top_k) or routes.dtype != self.dtype
        ):
            raise Misaligned(
                f"routes have shape {tuple(routes.shape)} and {routes.dtype}, but the model has "
                f"{self.num_layers} layers and {self.top_k} of {self.num_experts} experts",
                "sample and train with the same checkpoint",
            )
        self._given, self._replays, self._recorded = routes, replays, {}

    def choose(self, layer: int, own: Choice) -> Choice:
        """Record the router's own choice, and return the experts that compute."""
        self._recorded[layer] = own.detach().to(self.dtype)
        if self._given is None or not self._replays:
            return own
        if (given := self._given[:, layer]).shape != own.shape:
            problem = f"{len(given)} tokens have routes, but the layer computes {len(own)}"
            raise Misaligned(problem, "this is a bug. Report it with the batch")
        return torch.where(given == self.no_route, own, given.to(own.dtype))

    def get_routes(self) -> Routes:
        """Return the routers' own choices in the last forward pass."""
        zeros = torch.zeros_like(next(iter(self._recorded.values())))
        return torch.stack([self._recorded.get(i, zeros) for i in range(self.num_layers)], dim=1)

    def count_differing(self) -> Int[Tensor, "kinds=2"] | None:
        """Return how many routes differ from the given ones, and how many were compared.

        A route is the set of a token's experts in one layer, before a replay. None without routes.
        """
        if self._given is None:
            return None
        layers = sorted(self._recorded)
        given, own = self._given[:, layers], self.get_routes()[:, layers]
        is_known = given[..., 0] != self.no_route
        differs = (given.sort(-1).values != own.sort(-1).values).any(-1) & is_known
        return torch.stack([differs.sum(), is_known.sum()])


_keys = count()
_routings: WeakValueDictionary[int, ExpertRouting] = WeakValueDictionary()


@torch.library.custom_op("sightline::choose_experts", mutates_args=())
def _choose_experts(own: Tensor, layer: Tensor, key: int) -> Tensor:
    """Call `ExpertRouting.choose` in a compiled block, where it would break the graph."""
    chosen = _routings[key].choose(int(layer), own)
    return chosen.clone() if chosen is own else chosen


@_choose_experts.register_fake
def _(own: Tensor, layer: Tensor, key: int) -> Tensor:
    return torch.empty_like(own)


@cache
def _build_replaying(router_type: Any) -> type[nn.Module]:
    """Return the subclass of a router that asks its `ExpertRouting` for the experts.

    It is cached, because a compiler shares graphs between modules of one class.
    """

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = router_type.forward(self, hidden)
        if torch.compiler.is_compiling():
            chosen = torch.ops.sightline.choose_experts(own, self.compiled_layer, self.route_key)
        else:
            chosen = self.routing.choose(self.route_layer, own)
            if chosen is own:
                return logits, weights, own
        return logits, weigh(self, logits, chosen).to(weights.dtype), chosen

    return type(router_type.__name__, (router_type,), {"forward": forward})


def weigh(router: Any, logits: Float[Tensor, "tokens all"], chosen: Choice) -> Tensor:
    """Return the chosen experts' weights. A router's correction bias affects its choice only."""
    if hasattr(router, "e_score_correction_bias"):
        weights = logits.float().sigmoid().gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * getattr(router, "routed_scaling_factor", 1.0)
    weights = F.softmax(logits, dim=-1, dtype=torch.float).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


@torch.no_grad()
def _is_known(router: Any) -> bool:
    """Return whether `weigh` gives a router's own choice the weights that the router gives it.

    A copy with drawn values is tested, because the router may be on the meta device.
    """
    try:
        trial = copy.deepcopy(router).to_empty(device="cpu")
        draws = torch.Generator().manual_seed(0)
        for tensor in (*trial.parameters(), *trial.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=draws))
        hidden = torch.randn(8, trial.weight.shape[-1], generator=draws).to(trial.weight)
        logits, weights, own = trial(hidden)
        again = weigh(trial, logits, own)
        is_equal = torch.allclose(again.float(), weights.float(), rtol=1e-2)
        return is_equal and own.shape[-1] == trial.top_k <= trial.num_experts
    except (AttributeError, TypeError, ValueError, RuntimeError):  # of an unknown router
        return False


def _find_router(layer: Any) -> Any:
    """Return the layer's router. None for a dense layer."""
    block = getattr(layer, "mlp", None)
    return getattr(block, "gate", None) if hasattr(block, "experts") else None
