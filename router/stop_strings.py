"""Finds stop strings in text that comes in pieces, without ever letting out a part of one. Pure.

The stop string that is complete first ends the text; of two that are complete at the same character
the longer one does. So the result does not depend on how the text was cut into pieces. Each string is
followed by the Knuth-Morris-Pratt automaton: the work is one step a character and stop string, and the
number of characters to hold back is how far the furthest automaton has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown; `matched` is the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Scans one sequence's text.

    Args:
        stops: not empty ones; there may be none, and then all text passes at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop before the first character"
        # Longest first: it wins where two are complete at the same character.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Take in more text. After a match the scanner is finished and must not be fed again."""
        if not self._stops:
            return StopScan(text)
        buffer = self._held + text
        num_old = len(self._held)
        for position in range(num_old, len(buffer)):
            matched = self._step(buffer[position])
            if matched is not None:
                self._held = ""
                return StopScan(buffer[: position + 1 - len(matched)], matched)
        num_held = max(self._states)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return StopScan(buffer[:cut])

    def flush(self) -> str:
        """The text held back, now that the sequence has ended and no stop string can be completed."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        matched: str | None = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._failures[i][state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                matched = matched or stop
                state = self._failures[i][state - 1]
            self._states[i] = state
        return matched


def _failure_table(pattern: str) -> list[int]:
    """Entry i: length of the longest proper prefix of `pattern` that also ends pattern[: i + 1]."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
