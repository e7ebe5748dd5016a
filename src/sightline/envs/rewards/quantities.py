"""The reward for numbers, with units."""

from __future__ import annotations

import math
import re
from typing import Any

_SIZES = {
    "length": "Mm 1e6 nm 1e-9 μm 1e-6 mm .001 cm .01 m 1 km 1000 in .0254 inch .0254 inches .0254 "
    "ft .3048 foot .3048 feet .3048 yd .9144 yard .9144 mi 1609.344 mile 1609.344",
    "area": "ha 1e4 hectare 1e4 acre 4046.8564224",
    "volume": "ml 1e-6 cl 1e-5 l .001 gallon .003785411784",
    "mass": "Mg 1000 μg 1e-9 mg 1e-6 g .001 kg 1 kgs 1 t 1000 tonne 1000 oz .028349523125 "
    "ounce .028349523125 lb .45359237 lbs .45359237",
    "time": "ns 1e-9 μs 1e-6 ms .001 s 1 sec 1 min 60 minute 60 h 3600 hr 3600 hrs 3600 hour 3600 "
    "day 86400 week 604800",
    "calendar": "month 1 year 12", "data": "KiB 1024 MiB 1048576 GiB 1073741824",
    "speed": "m/s 3.6 km/h 1 kmh 1 kph 1 mph 1.609344 knot 1.852",
    "angle": f"° 1 deg 1 degree 1 rad {180 / math.pi} radian {180 / math.pi}",
    "percent": "% 1 percent 1", "celsius": "°c 1", "fahrenheit": "°f 1",
    "dollars": "$ 1 dollar 1", "euros": "€ 1 euro 1", "pounds": "£ 1",
    "pressure": "psi 6894.757293168 atm 101325",
}  # fmt: skip
"""Units without prefixes. Mm and Mg precede mm and mg, which lower case means."""
_PREFIXED = {
    "voltage": "V 1", "current": "A 1", "power": "W 1", "force": "N 1", "frequency": "Hz 1",
    "resistance": "Ω 1 ohm 1", "energy": "J 1 Wh 3600 cal 4.184 eV 1.602176634e-19",
    "pressure": "Pa 1 bar 1e5", "temperature": "K 1", "amount": "mol 1", "data": "B 1",
}  # fmt: skip
"""Units that take prefixes. Their case counts: mW is not MW."""
_SPELLED = {
    "length": "meter 1 metre 1", "mass": "gram .001", "volume": "liter .001 litre .001",
    "time": "second 1", "voltage": "volt 1", "current": "ampere 1 amp 1", "power": "watt 1",
    "force": "newton 1", "frequency": "hertz 1", "resistance": "ohm 1", "pressure": "pascal 1",
    "energy": "joule 1 calorie 4.184", "temperature": "kelvin 1", "data": "byte 1 bit .125",
}  # fmt: skip
_PREFIXES = {"": 1.0, "n": 1e-9, "μ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SPELLED_PREFIXES = dict(zip(("", "nano", "micro", "milli", "kilo", "mega", "giga", "tera"),
                             _PREFIXES.values(), strict=True)) | {"centi": 0.01}  # fmt: skip
_MULTIPLIERS = {"thousand": "e3", "million": "e6", "billion": "e9", "trillion": "e12"}


def _build_units() -> dict[str, tuple[str, float]]:
    units = {}
    prefixed = ((_PREFIXED, _PREFIXES), (_SIZES, {"": 1.0}), (_SPELLED, _SPELLED_PREFIXES))
    for table, prefixes in prefixed:
        for dimension, words in table.items():
            for name, size in zip(words.split()[::2], words.split()[1::2], strict=True):
                for prefix, factor in prefixes.items():
                    unit = (dimension, float(size) * factor)
                    units[prefix + name] = unit
                    if prefix not in ("m", "M") and len(prefix + name) > 1:
                        units[(prefix + name).lower()] = unit
    lengths = {name: size for name, (dimension, size) in units.items() if dimension == "length"}
    units |= {f"{name}2": ("area", size**2) for name, size in lengths.items()}
    return units | {f"{name}3": ("volume", size**3) for name, size in lengths.items()}


UNITS = _build_units()
"""The dimension of each unit, and its size."""
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+]?)\s?(?P<currency>[$€£]?)(?P<value>{_PLAIN})"
    rf"(?: (?P<above>\d+)(?=/))?(?:\s?/\s?(?P<divisor>{_PLAIN}))?\s?"
    r"(?P<unit>(?:°[a-z]?|%|[a-zμΩ]+)(?:/[a-z]+)?\^?[23]?)?",
    re.IGNORECASE,
)
_MULTIPLIER = re.compile(rf"(?<=\d)\s?({'|'.join(_MULTIPLIERS)})\b", re.IGNORECASE)
_POWER = re.compile(r"(?:(\d)\s?(?:[x×*·]|\\times|\\cdot)\s?|(?<![\w.]))10\^\{?(-?\d+)\}?")


def find_quantity(text: str) -> tuple[float, str, float] | None:
    """Return the last number of a text, its unit's dimension and size, if there is a number.

    The dimension is "" without a unit, and "?" and the word for an unknown one.
    """
    text = re.sub(r"\u2212|(?<!\w)\u2013(?=[\d.$€£])", "-", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})", ",", text)  # narrow spaces of thousands
    text = text.replace("²", "^2").replace("³", "^3").replace("µ", "μ").replace("\u2126", "Ω")
    text = _MULTIPLIER.sub(lambda word: _MULTIPLIERS[word[1].lower()], text)
    text = re.sub(r"\b(?:sq\.?|square) ([a-z]+)", r"\1^2", text, flags=re.IGNORECASE)
    text = re.sub(r"\bcubic ([a-z]+)", r"\1^3", text, flags=re.IGNORECASE)
    text = _POWER.sub(lambda power: f"{power[1] or 1}e{power[2]}", text)
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    match = matches[-1]
    value, divisor = (float((match[name] or "1").replace(",", "")) for name in ("value", "divisor"))
    value = value * divisor + float(match["above"]) if match["above"] else value  # 1 1/2
    if not divisor or not math.isfinite(value / divisor):
        return None
    unit = (match["unit"] or "").replace("^", "")
    word = unit.lower()
    singular = re.sub(r"(?<=...)s(?=\d?$)", "", word)
    names = (match["currency"], unit, word, singular)
    known = next(filter(None, map(UNITS.get, names)), None)
    sign = -1 if match["sign"] == "-" else 1
    return (sign * value / divisor, *(known or (word and f"?{word.removesuffix('s')}", 1.0)))


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
    in the reference's, unless `needs_unit`. Words that are not units are ignored ("5 because"). If
    the reference's unit is such a word ("5 apples"), others earn 0. If it has none, the answer's
    unit is ignored.
    """
    reference, given = find_quantity(str(expected)), find_quantity(answer)
    if reference is None or isinstance(expected, list | dict):
        raise ValueError(f"the reference {expected!r} has no number")
    if given is None:
        return 0.0
    (target, dimension, size), (value, given_dimension, given_size) = reference, given
    if re.fullmatch(r"\?[a-z]+", given_dimension) and not dimension.startswith("?"):
        given_dimension = ""
    if dimension and (given_dimension or needs_unit):
        if given_dimension != dimension:
            return 0.0
        value *= given_size / size
    return float(abs(value - target) <= max(relative * abs(target), absolute))
