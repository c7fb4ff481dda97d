"""Deep links: what is written is read back, and nothing else is taken for a link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.links import LARGEST, Link, parse

numbers = st.integers(0, LARGEST)
names = st.text("aZ09-_.&=%#+? ;<>\"'\u00e9\u2028\U0001f600", min_size=1, max_size=40)


@st.composite
def places(draw):
    values = [draw(numbers) for _ in range(draw(st.integers(0, 3)))]
    place = dict(zip(("step", "episode", "turn"), values, strict=False))
    if len(values) == 3 and draw(st.booleans()):
        start = draw(st.integers(0, LARGEST - 1))
        place |= {"start": start, "end": draw(st.integers(start + 1, LARGEST))}
    return place


@given(names.filter(lambda name: name not in (".", "..")), places())
def test_a_link_is_read_back_as_it_was(run, place):
    link = Link(run, **place)
    assert parse(str(link)) == parse(f"  #{link}\n") == link
    assert str(link).isascii() and not set(str(link)) & set("\"'<> /")


def test_the_string_is_the_documented_one():
    assert str(Link("r-1", 10, 3, 5, 2, 7)) == "run=r-1&step=10&episode=3&turn=5&span=2-7"
    assert str(Link("r-1", 10)) == "run=r-1&step=10"
    assert parse("step=10&run=a%26step%3D9") == Link("a&step=9", 10)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "not name=value"),
        ("step=1", "names no run"),
        ("run=a&stepp=1", "did you mean 'step'"),
        ("run=a&step=1&step=2", "given twice"),
        ("run=a&turn=1", "needs the episode too"),
        ("run=a&step=1&episode=0&span=1-2", "needs the turn too"),
        ("run=a&step=-1", "whole number"),
        ("run=a&step=01", "whole number"),
        ("run=a&step=٣", "whole number"),
        ("run=a&step=9007199254740992", "whole number"),
        ("run=a&step=1&episode=1&turn=1&span=4-4", "a later one"),
        ("run=a&step=1&episode=1&turn=1&span=4", "two numbers"),
        ("run=..%2F..%2Fetc", "without its path"),
        ("run=..", "without its path"),
        ("run=", "without its path"),
        ("run=a%00b", "without its path"),
        ("run=a" + "b" * 300, "without its path"),
        (None, "is text"),
    ],
)
def test_what_is_no_link_is_refused_in_one_line(text, said):
    with pytest.raises(WorkbenchError, match=said) as caught:
        parse(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@given(st.text("run=stepiod&pan123-%/.\x00 \u00e9", max_size=60))
def test_any_text_is_a_link_or_a_clear_error(text):
    try:
        assert parse(str(parse(text))) == parse(text)
    except WorkbenchError as error:
        assert str(error)


@pytest.mark.parametrize("place", [dict(step=True), dict(step=1.0), dict(step=1, episode=2, turn=3, end=4)])
def test_a_place_takes_whole_numbers_and_no_half_span(place):
    with pytest.raises(WorkbenchError):
        Link("a", **place)
