"""Drafts by looking up how a text may go on: where it said the same before, and in a table. No model.

Token by token, the likelier of two guesses is taken:

* what followed the longest suffix that occurred in the text before (prompt lookup), told by the suffix's length;
* what the target tends to say after the last few tokens (tandem/ngram_table.py), told by the table's certainty; for the
  first token, where the target has a draft head (tandem/draft_head.py), what that says with it;

each also by whether the other one says the same. How likely they are is what has come in the place of such guesses so
far (tandem/lookup/certainty.py). A draft ends where all of it is less likely to stand than is worth its time.

Where the request samples, the table's guess is drawn from its law, which is accepted more often than its likeliest
token would be. Which guess is taken, and where the draft ends, is decided before the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tandem.draft_law import SparseLaw, listed, pack
from tandem.errors import OutOfStep
from tandem.lookup.certainty import Certainty, Experience
from tandem.lookup.law import draw, mixed, shaped
from tandem.lookup.suffix_automaton import Reader, SuffixAutomaton
from tandem.ngram_table import NgramTable
from tandem.types import NO_DRAFT, Draft, Drafted, DraftWish, PackedLaw, SessionStart, Verification

# Matches from so many tokens on are of one kind; and how often the next token is right there, in greedy answers of the
# bundled model (docs/decisions/0007).
_MATCH_KINDS = ((1, 0.26), (2, 0.55), (3, 0.62), (4, 0.69), (5, 0.76), (7, 0.82), (10, 0.88), (15, 0.92))
_TABLE_KINDS = 6  # equal steps of certainty
# Of laws, by the same steps of their likeliest token's probability: how often what is drawn stands, in answers of the
# bundled model at temperatures from 0.7 to 1 (docs/decisions/0014).
_LAW_STANDS = (0.03, 0.18, 0.23, 0.29, 0.34, 0.60)
_LONGEST_CONTEXT = 8  # tokens shown to the table, which looks at four at most

Other = Literal["silent", "agrees", "differs"]


@dataclass(frozen=True, slots=True)
class _Kind:
    source: Literal["text", "table", "law"]
    level: int
    other: Other
    with_head: bool  # the table spoke with the draft head


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A token, or the law to draw it from; and how likely it is to stand if those before it do."""

    guess: int | SparseLaw
    kind: _Kind
    probability: float


class LookupDrafter:
    """Looks up in the text itself, from matches of `min_match` tokens on, and in `table` where there is one.

    `min_match` None: in the table only. `hears_head`: what the target's draft head says counts, too, where it has one.
    `least_certainty`: where the one who asks names none. A draft depends on texts as they are when it is asked for, and
    on draws that are made for it alone (docs/exactness.md).
    """

    def __init__(
        self,
        *,
        min_match: int | None = 1,
        table: NgramTable | None = None,
        hears_head: bool = True,
        least_certainty: float,
    ) -> None:
        if min_match is None and table is None:
            raise ValueError("there is nothing to look up in: neither the text nor a table")
        if min_match is not None and min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {min_match}")
        if not 0.0 <= least_certainty <= 1.0:
            raise ValueError(f"least_certainty must be between 0 and 1, got {least_certainty}")
        self._min_match = min_match
        self._table = table
        self._hears_head = hears_head
        self._least_certainty = least_certainty
        # A sampled token is another one than the likeliest more often than not.
        self._experience = {greedy: Experience() for greedy in (True, False)}

    def open(self, start: SessionStart) -> LookupSession:
        return LookupSession(
            start,
            min_match=self._min_match,
            table=self._table,
            hears_head=self._hears_head,
            least_certainty=self._least_certainty,
            certainty=Certainty(self._experience[start.sampling.greedy]),
        )


def lookup_drafters(
    table: NgramTable | None, *, min_match: int = 1, least_certainty: float
) -> dict[str, LookupDrafter]:
    """All there are, by name: `ngram`, and with a table `table`, and `auto`, which is both. The last one is the
    default, and hears the target's draft head."""
    if table is None:
        return {"ngram": LookupDrafter(min_match=min_match, least_certainty=least_certainty)}
    drafters = {
        "ngram": LookupDrafter(min_match=min_match, hears_head=False, least_certainty=least_certainty),
        "table": LookupDrafter(min_match=None, table=table, hears_head=False, least_certainty=least_certainty),
    }
    drafters["auto"] = LookupDrafter(min_match=min_match, table=table, least_certainty=least_certainty)
    return drafters


class LookupSession:
    """A text, and guesses behind it, which are not indexed until they stand.

    `propose` is `advance`, `guess` of `continuation`; the `auto` drafter takes these steps itself.
    """

    def __init__(
        self,
        start: SessionStart,
        *,
        min_match: int | None,
        table: NgramTable | None,
        hears_head: bool,
        least_certainty: float,
        certainty: Certainty,
    ) -> None:
        self._start = start
        self._min_match = min_match
        self._table = table
        self._hears_head = hears_head
        self._least_certainty = least_certainty
        self._certainty = certainty
        self._text = SuffixAutomaton(start.token_ids)
        self._guessed: tuple[int, ...] = ()
        self._judged: list[list[tuple[_Kind, int]]] = []  # by position behind the text: what came may be one of these

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

    async def propose(self, keep_length: int, new_tokens: Sequence[int], wish: DraftWish) -> Drafted:
        self.advance(keep_length, new_tokens)
        return Drafted(self.guess(wish))

    def close(self) -> None:
        self._text = SuffixAutomaton()
        self._guessed, self._judged = (), []

    def advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        """Keep `keep_length` tokens, append `new_tokens`. Raises OutOfStep, with nothing changed."""
        if keep_length > self.length:
            raise OutOfStep(f"the session holds {self.length} tokens, the message wants to keep {keep_length}")
        num_kept = keep_length - len(self._text.tokens)
        stand = self._guessed[: max(0, num_kept)]
        if num_kept >= 0:
            self._learn([*stand, *new_tokens[:1]])
        self._guessed, self._judged = (), []
        self._text.truncate(keep_length)
        self._text.extend(stand)
        self._text.extend(new_tokens)

    def guess(self, wish: DraftWish) -> Draft:
        """Tokens that the client is told; the next `advance` says which of them stand."""
        least_certainties = wish.least_certainties or (self._least_certainty,)
        next_law = listed(wish.next_law) if self._hears_head else []
        guesses = self._guesses(wish.num_draft_tokens, least_certainties, next_law)
        self._guessed = tuple(token_id for token_id, _ in guesses)
        return Draft(self._guessed, self._packed([law for _, law in guesses])) if guesses else NO_DRAFT

    def show(self, token_ids: Sequence[int]) -> None:
        """The client was told `token_ids` by another drafter."""
        self._guessed, self._judged = tuple(token_ids), []

    def _packed(self, laws: Sequence[SparseLaw | None]) -> PackedLaw | None:
        """As they cross the wire; the coupled rule looks at ids only."""
        if self._start.verification is Verification.COUPLED or all(law is None for law in laws):
            return None
        pairs = zip(laws, self._guessed, strict=True)
        return pack([_one_hot(token_id) if law is None else law for law, token_id in pairs])

    def _guesses(
        self, num_tokens: int, least_certainties: Sequence[float], next_law: Sequence[tuple[int, float]]
    ) -> list[tuple[int, SparseLaw | None]]:
        """Tokens, each with the law it was drawn from; None: one-hot. `next_law`: the draft head's of the first one."""
        reader = Reader(self._text)
        text_length = len(self._text.tokens)
        context = list(self._text.tokens[-_LONGEST_CONTEXT:])
        all_stand = 1.0
        guesses: list[tuple[int, SparseLaw | None]] = []
        self._judged = []
        while len(guesses) < num_tokens:
            position = text_length + len(guesses)
            least_certainty = least_certainties[min(len(guesses), len(least_certainties) - 1)]
            said_by_head = () if guesses else next_law
            candidates = self._candidates(reader, context, said_by_head, position=position)
            self._judged.append([(one.kind, one.guess) for one in candidates if isinstance(one.guess, int)])
            best = max(candidates, key=lambda one: one.probability, default=None)
            if best is None or all_stand * best.probability < least_certainty:
                break
            all_stand *= best.probability
            if isinstance(best.guess, int):
                token_id, law = best.guess, None
            else:
                law = best.guess
                token_id = draw(law, self._start, position=position, text_length=text_length)
                self._judged[-1].append((best.kind, token_id))
            guesses.append((token_id, law))
            context.append(token_id)
            reader.append(token_id)
        return guesses

    def _candidates(
        self, reader: Reader, context: Sequence[int], said_by_head: Sequence[tuple[int, float]], *, position: int
    ) -> list[_Candidate]:
        said = reader.next if self._min_match is not None and reader.match_length >= self._min_match else None
        foretold = mixed([] if self._table is None else self._table.law(context), said_by_head)
        with_head = bool(said_by_head)
        candidates: list[_Candidate] = []
        if said is not None:
            other: Other = "silent" if not foretold else "agrees" if foretold[0][0] == said else "differs"
            level, expected = _match_kind(reader.match_length)
            candidates.append(self._candidate(said, _Kind("text", level, other, with_head), expected=expected))
        other = "silent" if said is None else "differs"
        if not self._start.sampling.greedy:
            num_generated = position - self._start.prompt_length
            law = shaped(foretold, self._start.sampling, num_generated=num_generated)
            if law is not None:
                level = _level(float(law.probs[0]))
                candidates.append(
                    self._candidate(law, _Kind("law", level, other, with_head), expected=_LAW_STANDS[level])
                )
        elif foretold and foretold[0][0] != said:
            token_id, certainty = foretold[0]
            kind = _Kind("table", _level(certainty), other, with_head)
            candidates.append(self._candidate(token_id, kind, expected=certainty))
        return candidates

    def _candidate(self, guess: int | SparseLaw, kind: _Kind, *, expected: float) -> _Candidate:
        return _Candidate(guess, kind, self._certainty.of(kind, expected=expected))

    def _learn(self, came: Sequence[int]) -> None:
        """`came`: the guesses that stood, and the token behind them. What was not guessed in the end is judged, too:
        else a kind that is thought little of would never be heard of again. But not laws: that a token was not drawn
        from one tells nothing of it (and one that was, stood if it is what came: a recovered token is another one)."""
        for judged, came_here in zip(self._judged, came, strict=False):
            for kind, token_id in judged:
                self._certainty.learn(kind, right=token_id == came_here)


def _one_hot(token_id: int) -> SparseLaw:
    return SparseLaw(np.array([token_id], dtype=np.uint32), np.ones(1, dtype=np.float32))


def _level(certainty: float) -> int:
    return min(_TABLE_KINDS - 1, int(certainty * _TABLE_KINDS))


def _match_kind(length: int) -> tuple[int, float]:
    """The kind of a match of so many tokens, by its number, and how often such guesses are expected to be right."""
    level = max(index for index, (least, _) in enumerate(_MATCH_KINDS) if least <= length)
    return level, _MATCH_KINDS[level][1]
