"""Rewards for text, numbers and multiple choice, with their edge cases."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sightline.envs.rewards.choices import choice, format_options
from sightline.envs.rewards.quantities import number
from sightline.envs.rewards.text import (
    edit_distance,
    exact,
    find_answer,
    fuzzy,
    ocr,
    set_overlap,
)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("red", "red", 1),
        (" Red.\n", "red", 1),
        ("**red**", "RED", 1),
        ("dark  red", "dark red", 1),
        ("\uff12", "2", 1),  # a full-width digit
        ("red", "green", 0),
        ("red or green", "red", 0),
        ("", "red", 0),
        ("!", "?", 0),
        ("grey", ["gray", "grey"], 1),
        ("3", 3, 1),
        ("3", 3.0, 1),
        ("3.5", 3.5, 1),
        ("true", True, 1),
        (".5", "5", 0),  # a decimal point
        ("`.5`.", ".5", 1),
        ("... red", "red", 1),
        ("...", ".", 0),
    ],
)
def test_exact_ignores_only_case_spaces_and_outer_punctuation(
    answer: str, expected: Any, reward: float
) -> None:
    assert exact(answer, expected) == reward


def test_exact_can_keep_case() -> None:
    assert exact("Red", "red", keep_case=True) == 0 and exact("Red.", "Red", keep_case=True) == 1


@pytest.mark.parametrize("expected", [None, [], {"a": 1}, ["a", None]])
def test_invalid_text_reference_raises(expected: Any) -> None:
    for reward in (exact, fuzzy, ocr):
        with pytest.raises(ValueError, match="the reference"):
            reward("a", expected)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("kitten", "kitten", 1),
        ("kittem", "kitten", 1 - 1 / 6),
        ("sitting", "kitten", 1 - 3 / 7),
        ("dog", "kitten", 0),  # below the threshold
        ("kitten, and a very long story", "kitten", 0),
        ("", "kitten", 0),
        ("kiten", ["dog", "kitten"], 1 - 1 / 6),
    ],
)
def test_fuzzy_is_the_similarity_above_a_threshold(
    answer: str, expected: Any, reward: float
) -> None:
    assert fuzzy(answer, expected) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "expected", "unit", "reward"),
    [
        ("abcd", "abcd", "char", 1),
        ("abc", "abcd", "char", 0.75),
        ("ABCD", "abcd", "char", 0),
        ("a\nb", "a b", "char", 1),
        ("abcd" * 9, "abcd", "char", 0),  # more errors than characters
        ("", "", "char", 1),
        ("a", "", "char", 0),
        ("the red cat", "the black cat", "word", 1 - 1 / 3),
        ("", "the cat", "word", 0),
    ],
)
def test_ocr_is_one_minus_the_error_rate(
    answer: str, expected: str, unit: str, reward: float
) -> None:
    assert ocr(answer, expected, unit) == pytest.approx(reward)


def test_long_answer_takes_no_time() -> None:
    start = time.process_time()
    assert fuzzy("a" * 10**7, "b") == ocr("a" * 10**6, "a" * 10**4) == 0
    assert time.process_time() - start < 2
    assert fuzzy("123456789", "1234567890", threshold=0.9) == 0.9


def test_ocr_refuses_an_unknown_unit() -> None:
    with pytest.raises(ValueError, match="unit = 'line'"):
        ocr("a", "a", "line")


def slow_distance(first: str, second: str) -> int:
    """The textbook table, row by row."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        last, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b)))
    return row[-1]


@given(st.text("abc", max_size=80), st.text("abc", max_size=80))
def test_edit_distance_equals_the_textbook_table(first: str, second: str) -> None:
    assert edit_distance(first, second) == slow_distance(first, second)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("red, blue", ["blue", "red"], 1),
        ("Blue and red", "red, blue", 1),
        ("- red\n- blue", ["red", "blue"], 1),
        ("red, red, blue", ["red", "blue"], 1),
        ("red", ["red", "blue"], 2 / 3),
        ("red, blue, green, pink", ["red", "blue"], 2 / 3),
        ("green", ["red", "blue"], 0),
        ("none", [], 1),
        ("", "none", 1),
        ("red", [], 0),
        ("", ["red"], 0),
        ("sand", ["s"], 0),  # "and" splits between words only
        ("rock and roll, jazz", ["jazz", "rock and roll"], 1),
        ("1, 2", [1.0, 2.0], 1),
    ],
)
def test_set_overlap_is_the_f1_score(answer: str, expected: Any, reward: float) -> None:
    assert set_overlap(answer, expected) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", None),
        (r"\boxed{ }", "boxed", ""),
        ("nothing", "boxed", None),
        ("<answer>a</answer><answer> b\n</answer>", "(?s)<answer>(.*?)</answer>", "b"),
        ("<answer>a", "(?s)<answer>(.*?)</answer>", None),
        ("Answer: 4\nAnswer: 5", r"Answer: (\d+)", "5"),
        ("4 then 5", r"\d+", "5"),
        ("a", "(b)?a", ""),
    ],
)
def test_last_marked_answer_counts(text: str, pattern: str, answer: str | None) -> None:
    assert find_answer(text, pattern) == answer


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("5", 5, 1),
        ("5.0", "5", 1),
        ("The answer is 5.", 5, 1),
        ("2 + 3 = 5", 5, 1),
        ("5 or 6", 5, 0),
        ("1 2 3 4 5 6 7 8 9", 5, 0),
        ("-5", 5, 0),
        ("\u22125", -5, 1),
        ("10-5", 5, 1),
        ("1,234.5", 1234.5, 1),
        ("1,23", 123, 0),
        ("1.2e3", 1200, 1),
        ("1e999", 5, 0),
        ("1/2", 0.5, 1),
        ("1/0", 5, 0),
        ("5e", 5, 1),
        ("H2", 2, 0),  # a part of a name
        ("five", 5, 0),
        ("", 5, 0),
        ("0", 0, 1),
        ("0.1", 0, 0),
        ("50%", "50%", 1),
        ("50", "50%", 1),
        ("0.5", "50%", 0),
        ("$1,000", "1000 dollars", 1),
        ("€5", "$5", 0),
        ("3.5 km", "3500 m", 1),
        ("350000cm", "3.5 km", 1),
        ("3500", "3.5 km", 0),  # taken to be in km
        ("3.5 kg", "3.5 km", 0),
        ("25 m^2", "25 m²", 1),
        ("36 km/h", "10 m/s", 1),
        ("180°", "3.141592654 rad", 1),
        ("20 °C", "20 °F", 0),
        ("1 1/2 inches", "38.1 mm", 1),
        ("1/2", "1 1/2", 0),
        ("page 3, 1/2", 0.5, 1),
        ("10^3", 1000, 1),
        ("10³", 103, 0),
        (r"3 \times 10^{-2}", 0.03, 1),
        ("5 apples", 5, 1),
        ("\u20135", 5, 0),  # a dash in place of a minus sign
        ("\u22125", -5, 1),
        ("3\u20135", 5, 1),  # a range
        ("1\u202f000", 1000, 1),
        ("5 km", 5, 1),  # the reference has no unit
        ("5 V", "5 mV", 0),
        ("5000 mV", "5 V", 1),
        ("5 MW", "5 mW", 0),
        ("5 kw", "5 kW", 1),
        ("5 kJ", "5 N", 0),
        ("12 N", "12 kg", 0),
        ("1 kWh", "3.6 MJ", 1),
        ("5 µm", "0.005 mm", 1),
        ("3 k\u2126", "3000 Ω", 1),
        ("300 K", "300 °C", 0),
        ("5", "5 V", 1),
        ("5 because it says so", "5 V", 1),
        ("5 kg/m^3", "5 kg", 0),
        ("9.8 m/s", "9.8 m/s²", 0),
        ("9.8 m/s^2", "9.8 m/s²", 1),
        ("5 km", "5 apples", 0),
        ("5 pears", "5 apples", 0),
        ("5 Apples", "5 apples", 1),
        ("$5 billion", "$5 million", 0),
        ("1,500 thousand", "1.5 Million", 1),
        ("5 kilometers", "5 m", 0),
        ("5 kilometres", "5000 m", 1),
        ("5 Millimeters", "0.005 m", 1),
        ("1 Mm", "1 mm", 0),
        ("5 Mg", "5 mg", 0),
        ("5 MM", "5 mm", 1),
        ("5 lbs", "5 kg", 0),
        ("7 weeks", "7 days", 0),
        ("1 week", "7 days", 1),
        ("2 years", "24 months", 1),
        ("5 years", "5 days", 0),
        ("8 bits", "1 byte", 1),
        ("1 KiB", "1024 B", 1),
        ("5 volts", "5 mV", 0),
        ("5 kilowatts", "5000 W", 1),
        ("2 square meters", "20000 cm^2", 1),
        ("1 cubic foot", "1728 in3", 1),
        ("5 sq km", "5 m2", 0),
        ("36 kph", "10 m/s", 1),
        ("14.5 psi", "14.5 Pa", 0),
        ("5 because", "5 mm", 1),
    ],
)
def test_number_compares_the_last_number_with_its_unit(
    answer: str, expected: Any, reward: float
) -> None:
    assert number(answer, expected) == reward


def test_number_tolerances_and_required_units() -> None:
    assert number("104", 100, relative=0.05) == 1 and number("106", 100, relative=0.05) == 0
    assert number("96", -100, relative=0.05) == 0 and number("-96", -100, relative=0.05) == 1
    assert number("0.4", 0, absolute=0.5) == 1
    assert number("3.4 m", "300 cm", absolute=50) == 1  # in the reference's unit
    assert number("5 or so", "5 cm", needs_unit=True) == 0
    assert number("5", "5 cm", needs_unit=True) == 0 and number("5", 5, needs_unit=True) == 1


@pytest.mark.parametrize("expected", ["many", "", None, True, [5, 6]])
def test_reference_without_a_number_raises(expected: Any) -> None:
    with pytest.raises(ValueError, match="has no number"):
        number("5", expected)


OPTIONS = ["a dog", "a cat", "a bird", "it"]


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("B", "B", 1),
        ("b", "B", 1),
        ("(B)", "B", 1),
        ("B.", "B", 1),
        ("**B**", "B", 1),
        ("B. a cat", "B", 1),
        ("B: because it purrs", "B", 1),
        ("A cat", "B", 1),  # the option's text
        ("The answer is B.", "B", 1),
        ("Answer: (B)", "B", 1),
        ("The answer is A? No, the answer is B", "B", 1),
        ("I choose B", "B", 1),
        ("A dog would bark, so B", "B", 1),
        ("Answer: b", "B", 1),
        ("The answer is (b).", "B", 1),
        ("Perhaps c. No, option b because it purrs", "B", 1),
        ("Answer: a", "a dog", 1),
        ("The answer is a cat", "A", 0),
        ("My answer is a Cat", "A", 0),
        ("The answer is a.", "A", 1),
        ("the answer i would give is a bird", "A", 0),
        ("It is f(a), so B", "B", 1),
        ("A or B", "B", 0),
        ("A, B, C, D", "B", 0),
        ("BAD", "B", 0),
        ("", "B", 0),
        ("E", "B", 0),
        ("B", 1, 1),
        ("B", 1.0, 1),
        ("A", 0, 1),
        ("A", "a dog", 1),
        ("B", "(b)", 1),
    ],
)
def test_choice_names_one_option(answer: str, expected: Any, reward: float) -> None:
    assert choice(answer, expected, {"choices": OPTIONS}) == reward


def test_choice_works_without_a_column_of_options() -> None:
    assert choice("Answer: C", "C") == 1 and choice("C", 2, {"question": "?"}) == 1


@pytest.mark.parametrize("expected", ["E", 4, -1, "a fish", "", None, 1.5])
def test_reference_that_is_no_option_raises(expected: Any) -> None:
    with pytest.raises(ValueError, match="is none of the 4 options"):
        choice("B", expected, {"choices": OPTIONS})


def test_options_are_lettered() -> None:
    assert format_options(["x", 2]) == "A. x\nB. 2"
