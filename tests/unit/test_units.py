"""Human units: exact values, exact round trips, and one sentence for each mistake."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import units
from offbeat.errors import OffbeatError

PARSERS = (units.parse_bytes, units.parse_bandwidth, units.parse_seconds, units.parse_flops)
positive = st.floats(min_value=1e-300, max_value=1e300, allow_nan=False)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "16GiB", 16 * 2**30),
        (units.parse_bytes, "64MB", 64_000_000),
        (units.parse_bytes, "4 KiB", 4096),
        (units.parse_bytes, "312", 312),
        (units.parse_bytes, "312 bytes", 312),
        (units.parse_bytes, "1.5Gi", 1_610_612_736),
        (units.parse_bytes, 2**60 + 1, 2**60 + 1),
        (units.parse_bandwidth, "10Gbit/s", 1.25e9),
        (units.parse_bandwidth, "25 Gbps", 3.125e9),
        (units.parse_bandwidth, "12.5GB/s", 12.5e9),
        (units.parse_bandwidth, "1Mib/s", 2**17),
        (units.parse_bandwidth, 7, 7.0),
        (units.parse_seconds, "50us", 50e-6),
        (units.parse_seconds, "3ns", 3e-9),
        (units.parse_seconds, "50 µs", 50e-6),
        (units.parse_seconds, "1.5ms", 1.5e-3),
        (units.parse_seconds, "2 min", 120.0),
        (units.parse_seconds, "1e-3", 1e-3),
        (units.parse_flops, "65TFLOP/s", 65e12),
        (units.parse_flops, "15.7 TFLOPS", 15.7e12),
        (units.parse_flops, np.float32(2.0), 2.0),
    ],
)
def test_text_is_the_nearest_number(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("10furlong", "x: '10furlong' has the unknown unit 'furlong'; write it like "),
        ("-1", "x: '-1' must be finite and not negative"),
        (-1.0, "x: -1.0 must be finite and not negative"),
        ("1e999", "x: '1e999' must be finite and not negative"),
        ("1e9999999999999999999999", "must be finite and not negative"),
        (math.nan, "x: nan is not a number with a unit"),
        (math.inf, "x: inf is not a number with a unit"),
        ("", "x: '' is not a number with a unit"),
        ("fast", "x: 'fast' is not a number with a unit"),
        (True, "x: True is not a number or a text"),
        (None, "x: None is not a number or a text"),
        ([1], r"x: \[1\] is not a number or a text"),
        pytest.param(10**5000, "x: a value too long to show is not a number", id="long integer"),
        ("1" + "0" * 70, "is not a number with a unit"),
    ],
)
def test_mistakes_are_one_sentence(parse, value, sentence):
    with pytest.raises(OffbeatError, match=sentence) as caught:
        parse(value, "x")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "1e308GB"),
        (units.parse_bandwidth, "1e308GB/s"),
        (units.parse_seconds, "1e308h"),
        (units.parse_flops, "1e308PFLOPS"),
    ],
)
def test_a_unit_cannot_make_a_number_infinite(parse, text):
    with pytest.raises(OffbeatError, match="must be finite"):
        parse(text)


def test_tiny_exponents_are_zero_and_fast():
    assert units.parse_seconds("1e-99999999999999999999") == 0.0


@given(positive)
def test_plain_numbers_pass_unchanged(value):
    for parse in (units.parse_bandwidth, units.parse_seconds, units.parse_flops):
        assert parse(value) == value
        assert parse(repr(value)) == value


@given(positive)
def test_exact_text_is_read_back_as_the_same_number(value):
    assert units.parse_bandwidth(units.exact_bandwidth(value)) == value
    assert units.parse_bandwidth(units.exact_bandwidth(value, "B/s")) == value
    assert units.parse_seconds(units.exact_seconds(value)) == value
    assert units.parse_flops(units.exact_flops(value)) == value


@given(st.integers(min_value=0, max_value=2**70))
def test_exact_bytes_are_read_back_as_the_same_number(count):
    assert units.parse_bytes(units.exact_bytes(count)) == count


@given(st.integers(min_value=1, max_value=99_999), st.sampled_from("kMGTP"))
def test_exact_text_is_short_for_round_numbers(number, prefix):
    text = units.exact_bandwidth(units.parse_bandwidth(f"{number}{prefix}bit/s"))
    assert isinstance(text, str)
    assert len(text) <= 13


@given(st.floats(min_value=1e-9, max_value=1e18))
def test_formatted_text_is_read_back_within_its_rounding(value):
    assert units.parse_bandwidth(units.format_bandwidth(value)) == pytest.approx(value, rel=5.01e-4)
    assert units.parse_flops(units.format_flops(value)) == pytest.approx(value, rel=5.01e-4)
    assert units.parse_seconds(units.format_seconds(value)) == pytest.approx(value, rel=5.01e-4)


@given(st.integers(min_value=0, max_value=2**62))
def test_formatted_bytes_are_read_back_within_their_rounding(count):
    assert units.parse_bytes(units.format_bytes(count)) == pytest.approx(count, rel=5.01e-4, abs=1)


def test_formats_people_read():
    assert units.format_bytes(16 * 2**30) == "16 GiB"
    assert units.format_bytes(312) == "312 B"
    assert units.format_bandwidth(1.25e9) == "10 Gbit/s"
    assert units.format_flops(65e12) == "65 TFLOP/s"
    assert units.format_seconds(50e-6) == "50 us"
    assert units.format_seconds(86400) == "86400 s"
    assert units.exact_bytes(16 * 2**30) == "16GiB"
    assert units.exact_bytes(16_000_000_000) == "16GB"
    assert units.exact_seconds(0.1234567890123) == 0.1234567890123
    assert units.exact_bandwidth(450e9, "B/s") == "450GB/s"
