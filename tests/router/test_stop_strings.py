"""Stop strings against a model that sees the whole text at once."""

from hypothesis import example, given
from hypothesis import strategies as st

from router.stop_strings import StopStrings

_ALPHABET = "ab😀"


def _whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first ends the text, the longest one where several are."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text(_ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(_ALPHABET, min_size=1, max_size=5), max_size=4),
)
@example(pieces=["xxENDyy"], stops=["END", "ENDURE"])
@example(pieces=["E", "N", "DURE"], stops=["ENDURE", "END"])
@example(pieces=["aab", "aaa", "b"], stops=["aaab"])
def test_pieces_do_not_matter_and_no_part_of_a_stop_is_shown(
    pieces: list[str], stops: list[str]
) -> None:
    expected, expected_stop = _whole("".join(pieces), stops)
    scanner = StopStrings(stops)
    shown = ""
    for piece in pieces:
        scan = scanner.push(piece)
        shown += scan.text
        # Whatever may come next, what is shown already is right.
        assert expected.startswith(shown)
        if scan.matched is not None:
            assert (shown, scan.matched) == (expected, expected_stop)
            return
    assert expected_stop is None
    assert shown + scanner.flush() == expected
    assert scanner.flush() == ""


@given(st.lists(st.text(_ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_more_is_held_than_could_begin_a_stop(stops: list[str]) -> None:
    scanner = StopStrings(stops)
    assert scanner.push("zzz").text == "zzz"
    scan = scanner.push(stops[0][:-1])
    assert scan.matched is not None or len(scan.text) < len(stops[0])
