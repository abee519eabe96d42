import math
import re
from base64 import b64decode
from xml.etree import ElementTree

import pytest

from feddip_core.lab import svg


@pytest.mark.parametrize(
    "high, expected",
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (16, [0, 5, 10, 15, 20]),
        (200, [0, 50, 100, 150, 200]),
        (7e-4, [0, 2e-4, 4e-4, 6e-4, 8e-4]),
        (0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_numbers_that_reach_the_top(high, expected):
    assert svg.ticks(high) == pytest.approx(expected)


def test_a_curve_stands_where_its_values_are():
    line = svg.Line([0, 5, 10], [0.0, 1.0, 0.5], "#123456")
    (path,) = re.findall(r'<path d="(\S+ [^"]*)" fill="none" stroke="#123456"', svg.chart([svg.Panel("", "", [line])]))
    # 240 wide from 46 on, 120 high from 46 on: the middle of the axis, its top, its right end.
    assert path == "M46.0 166.0L166.0 46.0L286.0 106.0"


def test_a_step_holds_its_value_until_the_next():
    line = svg.Line([0, 10], [1.0, 0.0], "#123456", step=True)
    assert 'd="M46.0 46.0H286.0V166.0"' in svg.chart([svg.Panel("", "", [line])])


def test_what_is_not_finite_is_left_out_and_nothing_at_all_is_no_error():
    svg.chart([svg.Panel("", "", [svg.Line([1, 2, 3], [math.nan, math.inf, math.nan], "#000000")])])
    drawn = svg.chart([svg.Panel("", "", [svg.Line([1, 2], [1.0, math.nan], "#000000")]), svg.Panel("", "", [])])
    assert "nan" not in drawn and "inf" not in drawn
    ElementTree.fromstring(drawn)


def test_words_cannot_break_out_of_the_picture():
    panel = svg.Panel("<b>&", "<i>", [svg.Line([0, 1], [0, 1], "#000000", "</svg><script>")])
    root = ElementTree.fromstring(svg.chart([panel]))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<b>&", "<i>", "</svg><script>"} <= set(texts)
    shown = ElementTree.fromstring(svg.image("<svg/>", 'a "quoted" <alt>') + "</img>")
    assert shown.get("alt") == 'a "quoted" <alt>'
    assert b64decode(shown.get("src").split(",")[1]) == b"<svg/>"
