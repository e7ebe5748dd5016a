import pytest

from sightline.view import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (812, "812"), (999.9, "1.0k"), (1900, "1.9k"), (24_300, "24k"),
        (999_900, "1.0M"), (-1500, "-1.5k"), (3.14e9, "3.1G"),
    ],
)  # fmt: skip
def test_counts_are_short(value, text):
    assert formatting.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (-3, "0:00"), (100, "1:40"), (3725.4, "1:02:05")]
)
def test_durations_are_clocks(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (3.24e-8, "3.2e-08"), (0.01234, "0.0123"), (150.0, "150")],
)
def test_short_numbers_keep_their_size(value, text):
    assert formatting.short(value) == text


def test_a_sparkline_goes_from_lowest_to_highest():
    assert formatting.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert formatting.sparkline([9, 9, 0, 7], 2) == "▁█"
    assert formatting.sparkline([0.5, 0.5], 8) == "▁▁"
    assert formatting.sparkline([], 8) == ""
