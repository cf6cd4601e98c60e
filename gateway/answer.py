"""One answer, as it grows out of rounds: where it ends, its text, its tokens, and how well speculation worked.

It knows tokens and text, neither services nor HTTP. Rounds go in, `Delta`s come out:

1. Each token is counted, and looked up among the ids that end the answer.
2. Its text, through the incremental detokeniser, goes to the stop strings.
3. The answer ends at an end token or a stop string ("stop"), else at max_tokens ("length"). What the round holds after
   that is dropped: from the text, the ids, the log-probabilities, the usage and the trace alike.
4. Text is released as soon as it cannot belong to a stop string, and with it the tokens it came from; so a delta
   without text is only ever the last one, and the texts of all tokens joined are exactly the text of the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.detokenize import Detokenizer
from gateway.speculate import Round
from gateway.stops import StopMatcher
from tandem.types import FinishReason, TokenLogprob, TokenOrigin, Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """Where an answer ends, and what its text shows of the end.

    `end_token_ids` are the model's own (unless the request ignores them) and the request's stop_token_ids. Neither
    they nor the stop strings end an answer before it has more than `min_tokens` tokens. `include_stop` leaves the stop
    string, or the text of the end token, in the text; a special token has text only if special tokens are not skipped.
    """

    max_tokens: int  # 0: no answer at all, the prompt is only scored
    min_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    include_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerToken:
    """One token of the answer. `text` is its share of the answer's text: "" where it only begins a character."""

    token_id: int
    text: str
    origin: TokenOrigin
    round: int  # from 0, the prefill's
    position: int  # in the answer, from 0
    num_drafted: int = 0  # of its round: what the target tested
    logprob: TokenLogprob | None = None  # where asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What an answer has grown by. `finish_reason` is set on the last delta only."""

    text: str
    tokens: tuple[AnswerToken, ...]
    finish_reason: FinishReason | None = None


class Answer:
    """Consumer of one session's rounds. Feed it until `finish_reason` is set."""

    def __init__(self, rules: AnswerRules, detokenizer: Detokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(rules.stops, include_stop=rules.include_stop)
        self._pending: deque[tuple[AnswerToken, int]] = deque()  # tokens not yet out, and where their text begins
        self._decoded_chars = 0
        self._released_chars = 0
        self._num_rounds = 0
        self.num_tokens = 0
        self.num_accepted_dropped = 0  # accepted by the target, but past the end of the answer
        self.finish_reason: FinishReason | None = None

    def consume(self, outcome: Round) -> Delta | None:
        """Take one round. None while all its text must wait."""
        if self._rules.max_tokens == 0:
            self.finish_reason = FinishReason.LENGTH
            return self._delta("")
        released = ""
        logprobs: Sequence[TokenLogprob | None] = outcome.logprobs or [None] * len(outcome.token_ids)
        tokens = zip(outcome.token_ids, outcome.origins, logprobs, strict=True)
        for index, (token_id, origin, logprob) in enumerate(tokens):
            released += self._take(token_id, origin, logprob, num_drafted=outcome.num_drafted)
            if self.finish_reason is not None:
                dropped = outcome.origins[index + 1 :]
                self.num_accepted_dropped += dropped.count(TokenOrigin.ACCEPTED)
                break
        self._num_rounds += 1
        return self._delta(released)

    def _take(self, token_id: int, origin: TokenOrigin, logprob: TokenLogprob | None, *, num_drafted: int) -> str:
        rules = self._rules
        self.num_tokens += 1
        armed = self.num_tokens > rules.min_tokens
        is_end = armed and token_id in rules.end_token_ids
        text = "" if is_end and not rules.include_stop else self._detokenizer.feed(token_id)
        if is_end or self.num_tokens >= rules.max_tokens:
            self.finish_reason = FinishReason.STOP if is_end else FinishReason.LENGTH
            text += self._detokenizer.flush()
        released = self._matcher.feed(text, armed=armed)
        if self._matcher.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is not None:
            released += self._matcher.flush()
        token = AnswerToken(
            token_id=token_id,
            text=text,
            origin=origin,
            round=self._num_rounds,
            position=self.num_tokens - 1,
            num_drafted=num_drafted,
            logprob=logprob,
        )
        self._pending.append((token, self._decoded_chars))
        self._decoded_chars += len(text)
        return released

    def _delta(self, released: str) -> Delta | None:
        self._released_chars += len(released)
        if not released and self.finish_reason is None:
            return None
        tokens: list[AnswerToken] = []
        while self._pending:
            token, begin = self._pending[0]
            if self.finish_reason is None and begin + len(token.text) > self._released_chars:
                break
            self._pending.popleft()
            # Only at the end can a token's text be longer than what is out: a stop string begins in it.
            visible = token.text[: max(0, self._released_chars - begin)]
            tokens.append(token if visible == token.text else replace(token, text=visible))
        return Delta(text=released, tokens=tuple(tokens), finish_reason=self.finish_reason)


class SpeculationTally:
    """Sums over the rounds of one request, all its answers together: the `speculation` object of a response.

    Everything counts what the target tested, as the counters in gateway/metrics.py do: `drafted` are the tokens sent
    to the target, `accepted` those it accepted, also where the answer then ended before them. `acceptance_length` is
    tokens emitted per target call, the token that the target adds included: 1 + accepted / rounds; so an answer that no
    stop cut short has rounds + accepted tokens. Seconds are split by where they were spent: inside the draft service,
    inside the target service, and the rest of the waiting, which is network and serialisation. With `keeps_rounds` the
    report has every round's own figures too, as many as the answers have tokens at most.
    """

    def __init__(self, *, num_draft_tokens: int, keeps_rounds: bool = False) -> None:
        self._kept: list[dict[str, Any]] | None = [] if keeps_rounds else None
        self.rounds = 0
        self.draftless_rounds = 0
        self.prepared_hits = 0
        self.drafted = 0
        self.accepted = 0
        self.accepted_per_position = [0] * num_draft_tokens
        self._longest_draft = 0
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0
        self.network_seconds = 0.0
        self.num_bytes = 0

    def add(self, outcome: Round, *, is_first: bool = False) -> None:
        """Count a round; `is_first`: it is an answer's first, its prefill."""
        self.rounds += 1
        self.draftless_rounds += outcome.num_drafted == 0
        self.prepared_hits += outcome.prepared
        self.drafted += outcome.num_drafted
        self._longest_draft = max(self._longest_draft, outcome.num_drafted)
        self.accepted += outcome.num_accepted
        for position in range(min(outcome.num_accepted, len(self.accepted_per_position))):
            self.accepted_per_position[position] += 1
        draft, verify, network = round_seconds(outcome)
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.network_seconds += network
        self.num_bytes += outcome.num_bytes
        if self._kept is not None:
            self._kept.append(
                {
                    "prefill": is_first,
                    "drafted": outcome.num_drafted,
                    "accepted": outcome.num_accepted,
                    "prepared": outcome.prepared,
                    "draft_seconds": draft,
                    "verify_seconds": verify,
                    "network_seconds": network,
                }
            )

    @property
    def acceptance_length(self) -> float | None:
        """None before the first round."""
        return (self.rounds + self.accepted) / self.rounds if self.rounds else None

    def report(self, *, seed: int, verification: Verification) -> dict[str, Any]:
        """The `speculation` object. Ratios of nothing are null."""
        return {
            "verification": verification.value,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "acceptance_length": self.acceptance_length,
            "accepted_per_position": self.accepted_per_position[: self._longest_draft],
            "draftless_rounds": self.draftless_rounds,
            "prepared_hits": self.prepared_hits,
            "seed": seed,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "network_seconds": self.network_seconds,
            "bytes_sent": self.num_bytes,
        } | ({} if self._kept is None else {"round_trace": self._kept})


def round_seconds(outcome: Round) -> tuple[float, float, float]:
    """Where a round's time went: in the draft service, in the target service, in between."""
    verify = outcome.verify_times.queue_seconds + outcome.verify_times.forward_seconds
    waited = outcome.draft_seconds + outcome.verify_seconds
    return outcome.draft_service_seconds, verify, max(0.0, waited - outcome.draft_service_seconds - verify)
