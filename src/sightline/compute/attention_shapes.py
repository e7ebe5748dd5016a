"""Shapes of what attention takes and gives: of models, and token by token as kernels take them.

Heads of queries may share those of keys and values, and values may be narrower than keys.
"""

from __future__ import annotations

from jaxtyping import Float, Int32
from torch import Tensor

Queries = Float[Tensor, "rows heads tokens width"]
Keys = Float[Tensor, "rows kv_heads tokens width"]
Values = Float[Tensor, "rows kv_heads tokens value_width"]
Attended = Float[Tensor, "rows heads tokens value_width"]

TokenQueries = Float[Tensor, "tokens heads width"]
TokenKeys = Float[Tensor, "tokens kv_heads width"]
"""Keys, or values that are as wide."""
Bounds = Int32[Tensor, " bounds"]
"""0, and where each of the sequences side by side ends."""
