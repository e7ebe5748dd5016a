"""The reward for numbers, with units."""

from __future__ import annotations

import math
import re
from typing import Any

_SIZES = {
    "length": "mm .001 cm .01 m 1 meter 1 meters 1 metres 1 km 1000 in .0254 inch .0254 "
    "inches .0254 ft .3048 feet .3048 yd .9144 mi 1609.344 mile 1609.344 miles 1609.344",
    "area": "mm2 1e-6 cm2 1e-4 m2 1 ha 1e4 km2 1e6",
    "volume": "ml 1e-6 cl 1e-5 l .001 liter .001 liters .001 litres .001 cm3 1e-6 m3 1",
    "mass": "mg 1e-6 g .001 gram .001 grams .001 kg 1 t 1000 oz .028349523125 lb .45359237",
    "time": "ms .001 s 1 sec 1 second 1 seconds 1 min 60 minute 60 minutes 60 h 3600 hr 3600 "
    "hour 3600 hours 3600 day 86400 days 86400",
    "speed": "m/s 3.6 km/h 1 mph 1.609344",
    "angle": f"° 1 deg 1 degree 1 degrees 1 rad {180 / math.pi}",
    "percent": "% 1 percent 1",
    "celsius": "°c 1",
    "fahrenheit": "°f 1",
    "dollars": "$ 1 dollar 1 dollars 1",
    "euros": "€ 1 euro 1 euros 1",
    "pounds": "£ 1",
}
UNITS = {
    name: (dimension, float(size))
    for dimension, words in _SIZES.items()
    for name, size in zip(words.split()[::2], words.split()[1::2], strict=True)
}
"""The dimension of each unit, and its size."""
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+]?)\s?(?P<currency>[$€£]?)(?P<value>{_PLAIN})"
    rf"(?: (?P<above>\d+)(?=/))?(?:\s?/\s?(?P<divisor>{_PLAIN}))?\s?"
    r"(?P<unit>(?:°[a-z]?|%|[a-z]+)(?:/[a-z]+)?\^?[23]?)?",
    re.IGNORECASE,
)
_POWER = re.compile(r"(?:(\d)\s?(?:[x×*·]|\\times|\\cdot)\s?|(?<![\w.]))10\^\{?(-?\d+)\}?")


def find_quantity(text: str) -> tuple[float, str, float] | None:
    """Return the last number of a text, its unit's dimension (or "") and size, if there is one."""
    text = re.sub(r"\u2212|(?<!\w)\u2013(?=[\d.$€£])", "-", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})", ",", text)  # narrow spaces of thousands
    text = text.replace("²", "^2").replace("³", "^3")
    text = _POWER.sub(lambda power: f"{power[1] or 1}e{power[2]}", text)
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    value, divisor = (float((match[name] or "1").replace(",", "")) for name in ("value", "divisor"))
    value = value * divisor + float(match["above"]) if match["above"] else value  # 1 1/2
    if not divisor or not math.isfinite(value / divisor):
        return None
    unit = (match["unit"] or "").lower().replace("^", "")
    sign = -1 if match["sign"] == "-" else 1
    return (sign * value / divisor, *(UNITS.get(match["currency"]) or UNITS.get(unit, ("", 1.0))))


def number(
    answer: str,
    expected: Any,
    relative: float = 1e-6,
    absolute: float = 1e-9,
    needs_unit: bool = False,
) -> float:
    """Return 1 if the answer's last number is the reference, within one of two tolerances.

    `relative` is a fraction of the reference, and `absolute` is in its unit. If the reference has a
    unit, other units of its dimension are converted, and a number without a unit is assumed to be
    in the reference's, unless `needs_unit`. If it has none, the answer's unit is ignored.
    """
    reference, given = find_quantity(str(expected)), find_quantity(answer)
    if reference is None or isinstance(expected, list | dict):
        raise ValueError(f"the reference {expected!r} has no number")
    if given is None:
        return 0.0
    (target, dimension, size), (value, given_dimension, given_size) = reference, given
    if dimension and (given_dimension or needs_unit):
        if given_dimension != dimension:
            return 0.0
        value *= given_size / size
    return float(abs(value - target) <= max(relative * abs(target), absolute))
