"""Drafts by looking up how a text may go on: where it said the same before, and in a table. No model.

Token by token, the likelier of two guesses is taken:

* what followed the longest suffix that occurred in the text before (prompt lookup), told by the suffix's length;
* what the target tends to say after the last few tokens (tandem/ngram_table.py), told by the table's certainty;

each also by whether the other one says the same. How likely they are is what has come in the place of such guesses so
far (draft_service/certainty.py). A draft ends where all of it is less likely to stand than is worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draft_service.certainty import Certainty, Experience
from draft_service.drafters.base import Drafted
from draft_service.suffix_automaton import Reader, SuffixAutomaton
from tandem.errors import OutOfStep
from tandem.ngram_table import NgramTable
from tandem.types import NO_DRAFT, Draft, SessionStart

# Matches from so many tokens on are of one kind; and how often the next token is right there, in greedy answers of the
# bundled model (docs/decisions/0007).
_MATCH_KINDS = ((1, 0.26), (2, 0.55), (3, 0.62), (4, 0.69), (5, 0.76), (7, 0.82), (10, 0.88), (15, 0.92))
_TABLE_KINDS = 6  # equal steps of certainty
_LONGEST_CONTEXT = 8  # tokens shown to the table, which looks at four at most

Other = Literal["silent", "agrees", "differs"]


@dataclass(frozen=True, slots=True)
class _Kind:
    source: Literal["text", "table"]
    level: int
    other: Other


@dataclass(frozen=True, slots=True)
class _Guess:
    token_id: int
    kind: _Kind
    probability: float


class LookupDrafter:
    """Looks up in the text itself, from matches of `min_match` tokens on, and in `table` where there is one.

    `min_match` None: in the table only. `least_certainty`: where the one who asks names none. A draft depends on texts
    as they are when it is asked for, so its law is one-hot (docs/exactness.md).
    """

    def __init__(self, *, min_match: int | None = 1, table: NgramTable | None = None, least_certainty: float) -> None:
        if min_match is None and table is None:
            raise ValueError("there is nothing to look up in: neither the text nor a table")
        if min_match is not None and min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {min_match}")
        if not 0.0 <= least_certainty <= 1.0:
            raise ValueError(f"least_certainty must be between 0 and 1, got {least_certainty}")
        self._min_match = min_match
        self._table = table
        self._least_certainty = least_certainty
        # A sampled token is another one than the likeliest more often than not.
        self._experience = {greedy: Experience() for greedy in (True, False)}

    def open(self, start: SessionStart) -> LookupSession:
        return LookupSession(
            start.token_ids,
            min_match=self._min_match,
            table=self._table,
            least_certainty=self._least_certainty,
            certainty=Certainty(self._experience[start.sampling.greedy]),
        )


class LookupSession:
    """A text, and guesses behind it, which are not indexed until they stand.

    `propose` is `advance`, `guess` of `continuation`; the `auto` drafter takes these steps itself.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        min_match: int | None,
        table: NgramTable | None,
        least_certainty: float,
        certainty: Certainty,
    ) -> None:
        self._min_match = min_match
        self._table = table
        self._least_certainty = least_certainty
        self._certainty = certainty
        self._text = SuffixAutomaton(token_ids)
        self._guessed: tuple[int, ...] = ()
        self._looked_at: list[list[_Guess]] = []  # by position behind the text: all that might have been guessed there

    @property
    def length(self) -> int:
        return len(self._text.tokens) + len(self._guessed)

    @property
    def tokens(self) -> Sequence[int]:
        """The text without guesses."""
        return self._text.tokens

    @property
    def match_length(self) -> int:
        """Tokens of the text's end that occurred before."""
        return self._text.match.length

    async def propose(
        self,
        keep_length: int,
        new_tokens: Sequence[int],
        num_draft_tokens: int,
        *,
        least_certainty: float | None = None,
    ) -> Drafted:
        self.advance(keep_length, new_tokens)
        return Drafted(self.guess(num_draft_tokens, least_certainty=least_certainty))

    def close(self) -> None:
        self._text = SuffixAutomaton()
        self._guessed, self._looked_at = (), []

    def advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        """Keep `keep_length` tokens, append `new_tokens`. Raises OutOfStep, with nothing changed."""
        if keep_length > self.length:
            raise OutOfStep(f"the session holds {self.length} tokens, the message wants to keep {keep_length}")
        num_kept = keep_length - len(self._text.tokens)
        stand = self._guessed[: max(0, num_kept)]
        if num_kept >= 0:
            self._learn([*stand, *new_tokens[:1]])
        self._guessed, self._looked_at = (), []
        self._text.truncate(keep_length)
        self._text.extend(stand)
        self._text.extend(new_tokens)

    def guess(self, num_tokens: int, *, least_certainty: float | None = None) -> Draft:
        """At most `num_tokens` tokens, told to the client; the next `advance` says which of them stand."""
        least = self._least_certainty if least_certainty is None else least_certainty
        self._guessed = tuple(self._guesses(num_tokens, least))
        return Draft(self._guessed) if self._guessed else NO_DRAFT

    def show(self, token_ids: Sequence[int]) -> None:
        """The client was told `token_ids` by another drafter."""
        self._guessed, self._looked_at = tuple(token_ids), []

    def _guesses(self, num_tokens: int, least_certainty: float) -> list[int]:
        reader = Reader(self._text)
        context = list(self._text.tokens[-_LONGEST_CONTEXT:])
        all_stand = 1.0
        guesses: list[int] = []
        self._looked_at = []
        while len(guesses) < num_tokens:
            candidates = self._candidates(reader, context)
            self._looked_at.append(candidates)
            best = max(candidates, key=lambda guess: guess.probability, default=None)
            if best is None or all_stand * best.probability < least_certainty:
                break
            all_stand *= best.probability
            guesses.append(best.token_id)
            context.append(best.token_id)
            reader.append(best.token_id)
        return guesses

    def _candidates(self, reader: Reader, context: Sequence[int]) -> list[_Guess]:
        said = reader.next if self._min_match is not None and reader.match_length >= self._min_match else None
        listed = None if self._table is None else self._table.next(context)
        candidates: list[_Guess] = []
        if said is not None:
            other: Other = "silent" if listed is None else "agrees" if listed[0] == said else "differs"
            level, expected = _match_kind(reader.match_length)
            candidates.append(self._guess(said, _Kind("text", level, other), expected=expected))
        if listed is not None and listed[0] != said:
            level = min(_TABLE_KINDS - 1, int(listed[1] * _TABLE_KINDS))
            kind = _Kind("table", level, "silent" if said is None else "differs")
            candidates.append(self._guess(listed[0], kind, expected=listed[1]))
        return candidates

    def _guess(self, token_id: int, kind: _Kind, *, expected: float) -> _Guess:
        return _Guess(token_id, kind, self._certainty.of(kind, expected=expected))

    def _learn(self, came: Sequence[int]) -> None:
        """`came`: the guesses that stood, and the token behind them. What was not guessed in the end is judged, too:
        else a kind that is thought little of would never be heard of again."""
        for candidates, token_id in zip(self._looked_at, came, strict=False):
            for guess in candidates:
                self._certainty.learn(guess.kind, right=guess.token_id == token_id)


def _match_kind(length: int) -> tuple[int, float]:
    """The kind of a match of so many tokens, by its number, and how often such guesses are expected to be right."""
    level = max(index for index, (least, _) in enumerate(_MATCH_KINDS) if least <= length)
    return level, _MATCH_KINDS[level][1]
