"""Obeying a grammar: llama.cpp's grammar sampler, asked about as few tokens as possible.

Asking it about a whole vocabulary takes longer than a step of a small model, so a token is chosen freely first and only
that one is checked. A refused token loses its weight and the choice is repeated: the same distribution as if all tokens
that the grammar refuses had been taken out before. Where little is allowed, the first byte of what is tells the rest apart.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from services.llm.core.choose import Floats
from services.llm.core.trigger import Watch
from services.llm.core.wire import Constraint
from services.llm.host.bindings import api
from services.llm.host.context import TOKEN_DATA, token_data
from services.llm.host.llama import LlamaError, Vocabulary

_FREE_TRIES: Final = 3
_NARROW_TRIES: Final = 24
_FEW: Final = 2048
_MOST_S: Final = 0.25
"""Processor time that one question may take: more means a grammar whose readings multiply with every character."""

Ids = npt.NDArray[np.int32]


class GrammarError(Exception):
    """No token can follow, or the grammar takes too long."""


class Picker(Protocol):
    """Chooses freely; remembers only what is accepted."""

    def pick(self, logits: Floats) -> int:
        """Return a token; the logits stay as they are."""

    def accept(self, token: int) -> None:
        """Take note of the token that was chosen in the end."""

    def close(self) -> None:
        """Free what it holds."""


class Alphabet:
    """How a vocabulary's tokens begin. `first`: each token's first byte, -1 for tokens that are no text."""

    def __init__(self, vocabulary: Vocabulary, ends: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self.ends = np.asarray(ends, np.int32)
        self.first = np.full(vocabulary.size, -1, np.int16)
        singles = []
        for token in range(vocabulary.size):
            piece = vocabulary.piece(token, special=False)
            if piece and piece[0]:
                self.first[token] = piece[0]
                if len(piece) == 1:
                    singles.append(token)
        self.first[self.ends] = -1
        self.no_text = self.first < 0
        self.no_text[self.ends] = False
        self.singles = np.asarray([token for token in singles if token not in ends], np.int32)
        self.single_bytes = self.first[self.singles]
        # A byte that is no token by itself cannot be asked about: tokens that begin with it stay candidates.
        self.unasked = np.ones(256, bool)
        self.unasked[self.single_bytes] = False


class Grammar:
    """llama.cpp's grammar sampler. Raises LlamaError for a grammar that it does not accept."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self._sampler: Any = api.llama_sampler_init_grammar(vocabulary.pointer, text.encode(), b"root")
        if not self._sampler:
            raise LlamaError("llama.cpp does not accept the grammar")
        self._one = np.zeros(1, TOKEN_DATA)
        self._one_struct = token_data(self._one)

    def allows(self, token: int) -> bool:
        """Return whether a token may come next."""
        self._one["id"][0], self._one["logit"][0] = token, 0.0
        self._ask(self._one_struct)
        return bool(self._one["logit"][0] == 0.0)

    def allowed(self, tokens: Ids) -> npt.NDArray[np.bool_]:
        """Return which of several tokens may come next."""
        entries = np.zeros(len(tokens), TOKEN_DATA)
        entries["id"] = tokens
        if len(tokens):
            self._ask(token_data(entries))
        return entries["logit"] == 0.0  # type: ignore[no-any-return]

    def _ask(self, struct: Any) -> None:  # noqa: ANN401 - a C struct
        began_s = time.thread_time()
        api.llama_sampler_apply(self._sampler, ctypes.byref(struct))
        _check_time(time.thread_time() - began_s)

    def accept(self, token: int) -> None:
        """Go on after a token that is allowed: any other ends the process."""
        began_s = time.thread_time()
        api.llama_sampler_accept(self._sampler, token)
        _check_time(time.thread_time() - began_s)

    def close(self) -> None:
        """Free the sampler."""
        api.llama_sampler_free(self._sampler)


def _check_time(seconds: float) -> None:
    if seconds > _MOST_S:
        raise GrammarError(f"the grammar took {seconds:.2f} s for one token; at most {_MOST_S:g} s are allowed")


class Constrained:
    """Chooses what the grammar of a constraint allows: from the first token, or from the place it watches for.

    `shown`: control tokens that are text here.
    """

    def __init__(self, picker: Picker, constraint: Constraint, alphabet: Alphabet, shown: Sequence[int] = ()) -> None:
        self._picker = picker
        self._alphabet = alphabet
        self._vocabulary = alphabet.vocabulary
        self._text = constraint.grammar
        self._shown = np.asarray(shown, np.int32)
        thoughts = constraint.thoughts
        self._watch = Watch(
            triggers=tuple(trigger.encode() for trigger in constraint.triggers),
            anchored=constraint.anchored,
            thoughts=None if thoughts is None else (thoughts[0].encode(), thoughts[1].encode()),
            inside=constraint.inside,
        )
        self._grammar = None if constraint.triggers or constraint.inside else self._begun()

    def _begun(self) -> Grammar:
        return Grammar(self._vocabulary, self._text)

    def choose(self, logits: Floats, row: int) -> int:  # noqa: ARG002 - the protocol's signature
        """See Chooser."""
        token = self._waiting(logits) if self._grammar is None else self._obeying(self._grammar, logits)
        self._picker.accept(token)
        return token

    def close(self) -> None:
        """See Chooser."""
        self._picker.close()
        if self._grammar is not None:
            self._grammar.close()

    # ---- before it holds --------------------------------------------------------------------------------------

    def _waiting(self, logits: Floats) -> int:
        """Return a free choice; one that completes a trigger must also begin what the grammar wants after it."""
        for _ in range(_NARROW_TRIES):
            token = self._picker.pick(logits)
            watch, rest = self._watch.seen(self._vocabulary.piece(token, special=token in self._shown))
            if rest is None:
                self._watch = watch
                return token
            grammar = self._begun()
            if self._begins(grammar, rest):
                self._grammar = grammar
                return token
            grammar.close()
            logits[token] = -np.inf
        raise GrammarError("what the model writes there cannot go on as it must")

    def _begins(self, grammar: Grammar, text: bytes) -> bool:
        for token in self._vocabulary.tokenize(text, parse_special=False) if text else ():
            if not grammar.allows(token):
                return False
            grammar.accept(token)
        return True

    # ---- while it holds ---------------------------------------------------------------------------------------------

    def _obeying(self, grammar: Grammar, logits: Floats) -> int:
        token = self._tried(grammar, logits, _FREE_TRIES)
        if token is None:
            candidates = self._narrowed(grammar, logits)
            if len(candidates) > _FEW:
                token = self._tried(grammar, logits, _NARROW_TRIES)
            if token is None:
                token = self._settled(grammar, logits, candidates)
        if token not in self._alphabet.ends:  # nothing comes after it
            grammar.accept(token)
        return token

    def _tried(self, grammar: Grammar, logits: Floats, tries: int) -> int | None:
        """Choose freely and check; what is refused loses its weight."""
        for _ in range(tries):
            token = self._picker.pick(logits)
            if (not self._alphabet.no_text[token] or token in self._shown) and grammar.allows(token):
                return token
            logits[token] = -np.inf
        return None

    def _narrowed(self, grammar: Grammar, logits: Floats) -> Ids:
        """Take out all tokens whose first byte cannot come; return the others that have a weight left."""
        alphabet = self._alphabet
        bytes_allowed = alphabet.unasked.copy()
        bytes_allowed[alphabet.single_bytes[grammar.allowed(alphabet.singles)]] = True
        possible = bytes_allowed[alphabet.first] & (alphabet.first >= 0)
        for others in (alphabet.ends, self._shown):
            possible[others[grammar.allowed(others)]] = True
        possible &= logits > -np.inf
        logits[~possible] = -np.inf
        candidates = np.flatnonzero(possible).astype(np.int32)
        if len(candidates) == 0:
            raise GrammarError("no token of the model can follow")
        return candidates

    def _settled(self, grammar: Grammar, logits: Floats, candidates: Ids) -> int:
        """Ask about every candidate and choose among those that are allowed."""
        candidates = candidates[logits[candidates] > -np.inf]
        refused = candidates[~grammar.allowed(candidates)]
        if len(refused) == len(candidates):
            raise GrammarError("no token of the model can follow")
        logits[refused] = -np.inf
        return self._picker.pick(logits)
