"""Model families, one folder each: layout, pixels, positions, chat format and forward pass.

Code outside a family's folder never names the family. `registry` finds the families.
"""

from sightline.families.protocol import Family, Forward
from sightline.families.registry import check_parallel, load_family, load_forward, load_renderer

__all__ = [
    "Family",
    "Forward",
    "check_parallel",
    "load_family",
    "load_forward",
    "load_renderer",
]
