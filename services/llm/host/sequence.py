"""One choice of one request, from its prompt to its last token."""

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from services.llm.core.choose import Likelihood
from services.llm.core.room import Claim
from services.llm.core.sentences import SentenceLimit
from services.llm.core.stops import StopMatcher
from services.llm.core.utf8 import Utf8Stream
from services.llm.core.wire import Delta, Finish, Logprob, Submit
from services.llm.host.context import Tokens
from services.llm.host.llama import Vocabulary

if TYPE_CHECKING:
    from services.llm.host.drafting import Drafter
    from services.llm.host.sampling import Chooser

NO_CELLS: Final = -1


class Spelling:
    """The text of tokens, looked up once: `texts[token]` is None where the bytes are no whole characters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def piece(self, token: int) -> bytes:
        """Return a token's bytes; control tokens have none."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._vocabulary.piece(token, special=False)
        return piece

    def mark(self, token: int) -> bytes:
        """Return the bytes of a control token's name."""
        return self._vocabulary.piece(token, special=True)

    def text(self, token: int) -> str | None:
        """Return a token's text, or None when it is a part of a character."""
        try:
            return self._texts[token]
        except KeyError:
            try:
                text: str | None = self.piece(token).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token] = text
            return text


class Sequence:
    """State of a choice. `cells`: its sequence number in the cache; `computed`: tokens whose cells are there.

    `told`: what is known of the likelihood of its prompt's tokens, if that is asked for.
    """

    __slots__ = (
        "_log_likelihood", "_said", "_sentences", "_shown", "_sizes", "_stops", "_text", "_unsent", "_unsent_logprobs", "_unsent_tokens", "arrival", "cached",
        "cells", "choice", "chooser", "claim", "computed", "drafter", "finish", "generated", "leader", "limits", "logprobs", "pending",
        "prompt", "saved", "submit", "told", "wants_likelihood",
    )  # fmt: skip

    def __init__(self, submit: Submit, prompt: Tokens, *, choice: int, arrival: int, leader: "Sequence | None") -> None:
        self.submit = submit
        self.prompt = prompt
        self.choice = choice
        self.leader = leader
        self.limits = submit.limits
        self.claim = Claim(submit.rank, arrival)
        self.cells = NO_CELLS
        self.computed = 0
        self.cached = 0
        self.pending: int | None = None
        self.generated: list[int] = []
        self.saved: bytes | None = None
        self.chooser: Chooser | None = None
        self.drafter: Drafter | None = None
        self.finish: Finish | None = None
        # The choices of a request have one prompt: the first tells of it.
        self.told: list[Logprob] | None = [] if submit.tells_prompt and leader is None else None
        self.wants_likelihood = submit.logprobs >= 0 or submit.limits.min_probability > 0.0
        self._text = Utf8Stream()
        self._stops = StopMatcher(submit.limits.stop) if submit.limits.stop else None
        self._sentences = SentenceLimit(submit.limits.max_sentences) if submit.limits.max_sentences else None
        self._said = False
        self._unsent: list[str] = []
        self._unsent_tokens = 0
        self._unsent_logprobs: list[Logprob] = []
        self._shown = frozenset(submit.shown)
        self._sizes: list[int] | None = [] if submit.sized else None
        self._log_likelihood = 0.0

    @property
    def prefilling(self) -> bool:
        """Whether a part of the prompt is still to be computed."""
        return self.computed < len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.limits.max_tokens - len(self.generated)

    def computed_tokens(self) -> Tokens:
        """Return the tokens whose cells are computed."""
        if self.computed <= len(self.prompt):
            return self.prompt[: self.computed]
        answer = np.asarray(self.generated[: self.computed - len(self.prompt)], np.int32)
        return np.concatenate([self.prompt, answer])

    def tell(self, spelling: Spelling, likelihood: Likelihood | None) -> None:
        """Note how likely the prompt's next token was; None for the first, which nothing precedes."""
        assert self.told is not None  # noqa: S101 - only such have outputs for it
        token = int(self.prompt[len(self.told)])
        best: tuple[Logprob, ...] = ()
        if likelihood is not None:
            best = tuple(Logprob(each, spelling.piece(each), value) for each, value in likelihood.best)
        # In a prompt, control tokens are text.
        piece = spelling.piece(token) or spelling.mark(token)
        self.told.append(Logprob(token, piece, None if likelihood is None else likelihood.chosen, best))

    def take(self, token: int, spelling: Spelling, *, ends: bool, likelihood: Likelihood | None) -> bool:
        """Add the token that was chosen. Returns whether there is news that should not wait: first text, or the end."""
        self.generated.append(token)
        self.pending = token
        self._unsent_tokens += 1
        if likelihood is not None:
            self._note(token, spelling, likelihood)
        if self._sizes is not None:
            self._sizes.append(0)
        if ends:
            return self._end("stop")
        text = None if token in self._shown else spelling.text(token)
        if text is None or self._text.open:
            text = self._text.push(spelling.mark(token) if token in self._shown else spelling.piece(token))
        text = self._show(text)
        if self._ended_by_text:
            return self._end("stop")
        if len(self.generated) >= self.limits.max_tokens:
            return self._end("length")
        if self.limits.min_probability > 0.0 and self._log_likelihood < math.log(self.limits.min_probability):
            return self._end("min_probability")
        return bool(text) and not self._said

    def _note(self, token: int, spelling: Spelling, likelihood: Likelihood) -> None:
        self._log_likelihood += likelihood.chosen
        if self.submit.logprobs >= 0:
            best = tuple(Logprob(each, spelling.piece(each), value) for each, value in likelihood.best)
            self._unsent_logprobs.append(Logprob(token, spelling.piece(token), likelihood.chosen, best))

    def _show(self, text: str, *, last: bool = False) -> str:
        """Add text to what is shown, as far as stop strings and sentences allow. Returns what was added."""
        if self._stops is not None:
            text = self._stops.push(text)
            text += self._stops.end() if last else ""
        if self._sentences is not None:
            text = self._sentences.push(text)
        if text:
            self._unsent.append(text)
            if self._sizes is not None:
                self._sizes[-1] += len(text)
        return text

    @property
    def _ended_by_text(self) -> bool:
        return (self._stops is not None and self._stops.hit is not None) or (
            self._sentences is not None and self._sentences.hit
        )

    def end_unanswered(self) -> None:
        """End without a token, as `max_tokens` 0 wants."""
        self._end("length")

    def _end(self, reason: str) -> bool:
        if not self._ended_by_text:
            self._show(self._text.end(), last=True)
        enough = self._sentences is not None and self._sentences.hit
        hit = self._stops.hit if self._stops is not None and not enough else None
        if hit is not None:
            reason = "stop"
        self.finish = Finish(
            reason="sentences" if enough else reason,
            stop_string=hit,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            completion_tokens=len(self.generated),
            drafted_tokens=self.drafter.drafted if self.drafter is not None else 0,
            accepted_tokens=self.drafter.accepted if self.drafter is not None else 0,
        )
        return True

    def delta(self) -> Delta | None:
        """Return what was gained since the last call, or None when there is nothing to tell yet."""
        if not self._unsent and self.finish is None:
            return None
        delta = Delta(
            request=self.submit.request,
            choice=self.choice,
            text="".join(self._unsent),
            tokens=self._unsent_tokens,
            finish=self.finish,
            logprobs=tuple(self._unsent_logprobs),
            sizes=() if self._sizes is None else tuple(self._sizes),
        )
        if self._sizes is not None:
            self._sizes.clear()
        self._unsent.clear()
        self._unsent_logprobs.clear()
        self._unsent_tokens = 0
        self._said = True
        return delta
