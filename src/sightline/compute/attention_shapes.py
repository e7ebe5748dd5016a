"""Shapes of attention inputs and outputs, as models use them and, token by token, as kernels do.

Query heads may share key and value heads, and values may be narrower than keys.
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
"""Keys, or values of the same width."""
Bounds = Int32[Tensor, " bounds"]
"""0, followed by the end of each packed sequence."""
