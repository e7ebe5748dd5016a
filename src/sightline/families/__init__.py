"""Model families, one folder each: layout, pixels, positions, chat format and forward pass.

Code outside a family's folder never names the family. `registry` finds the families.
"""

from sightline.families.protocol import Family as Family
from sightline.families.protocol import Forward as Forward
from sightline.families.registry import check_parallel as check_parallel
from sightline.families.registry import load_family as load_family
from sightline.families.registry import load_forward as load_forward
from sightline.families.registry import load_renderer as load_renderer
