"""Where sentences end in streamed text: found across token borders, shown whole, and nothing is held back.

A sentence ends with a run of terminators, any closing quotes and brackets after it, and then, for terminators that also
stand inside words and numbers, white space. Not counted: the stops of decimals, abbreviations, initials and list numbers.
What follows decides, so an end is known with the first character after it.
"""

import re
from typing import Final

# Unicode's Sentence_Terminal characters (UAX #29) of the scripts that write them without white space, or nowhere else.
_ALWAYS: Final = frozenset("。！？．｡।॥؟۔።။៕")
_BEFORE_SPACE: Final = frozenset(".!?…‼⁇⁈⁉")
_CLOSERS: Final = frozenset("\"')]}»”’」』）】》〉］｣")
_ABBREVIATED: Final = (
    "mr mrs ms dr prof rev gen sen rep hon gov capt col lt sgt st sr jr messrs mme mlle vs cf al approx est dept fig figs "
    "eq vol pp ed eds inc ltd co corp bros univ jan feb apr jun jul aug sep sept oct nov dec "
    "e.g i.e a.m p.m u.s u.k u.n d.c ph.d bzw usw z.b d.h"
)
_ABBREVIATIONS: Final = frozenset(_ABBREVIATED.split())
_INITIAL: Final = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_LIST_NUMBER: Final = re.compile(r"[ \t]*(?:\d{1,3}|[^\W\d_])")
# Longer words are no abbreviations; of a longer line only the end is kept.
_KEPT: Final = 32


class SentenceLimit:
    """Watches a text that arrives in pieces for the end of its n-th sentence."""

    __slots__ = ("_ending", "_hit", "_left", "_line", "_needs_space", "_short_line")

    def __init__(self, sentences: int) -> None:
        if sentences < 1:
            raise ValueError("a text of no sentences has no end")
        self._left = sentences
        self._hit = False
        self._line = ""
        self._short_line = True
        self._ending = False
        self._needs_space = False

    @property
    def hit(self) -> bool:
        """Whether the last sentence has ended."""
        return self._hit

    def push(self, text: str) -> str:
        """Return the text that belongs to the sentences. After the last one everything is swallowed."""
        if self._hit:
            return ""
        for place, character in enumerate(text):
            if self._ends_before(character):
                self._left -= 1
                if self._left == 0:
                    self._hit = True
                    return text[:place]
        return text

    def _ends_before(self, character: str) -> bool:
        """Take a character; return whether a sentence ended before it."""
        if self._ending:
            if character in _ALWAYS or character in _BEFORE_SPACE:
                self._needs_space = self._needs_space and character not in _ALWAYS
                self._note(character)
                return False
            if character in _CLOSERS:
                self._note(character)
                return False
            self._ending = False
            ended = character.isspace() or not self._needs_space
            self._note(character)
            return ended
        if character in _ALWAYS:
            self._ending, self._needs_space = True, False
        elif character in _BEFORE_SPACE and not (character == "." and self._is_short_form()):
            self._ending, self._needs_space = True, True
        self._note(character)
        return False

    def _note(self, character: str) -> None:
        if character in "\r\n":
            self._line, self._short_line = "", True
            return
        self._line += character
        if len(self._line) > 2 * _KEPT:
            self._line, self._short_line = self._line[-_KEPT:], False

    def _is_short_form(self) -> bool:
        """Whether a stop here belongs to the word before it."""
        if self._short_line and _LIST_NUMBER.fullmatch(self._line):
            return True
        words = self._line.split()
        if not words or self._line[-1].isspace():
            return False
        word = words[-1].lstrip("\"'([{«“‘")
        # "I" ends sentences as a pronoun far more often than it abbreviates a name.
        return word.lower() in _ABBREVIATIONS or (word != "I" and _INITIAL.fullmatch(word) is not None)
