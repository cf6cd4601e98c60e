"""The nouns that cross borders between Tandem's parts: frozen values, no behaviour beyond their own checks.

Words: the *draft* proposes tokens, the *target* verifies them; one propose + verify cycle is a *round*. A drafted
token is *accepted* or rejected; after a rejection the target emits a *recovered* token, after a draft accepted whole
a *bonus* token; a round without a draft emits a *plain* token.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class TokenOrigin(enum.Enum):
    """Where an emitted token comes from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"


class Verification(enum.Enum):
    """How the target decides on drafted tokens; both rules are exact (docs/exactness.md)."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class DraftlessReason(enum.Enum):
    """Why a round had no draft. Bounded, so that it can label a metric."""

    OFF = "off"  # the request switched speculation off, or asked for zero draft tokens
    FIRST = "first"  # the prefill's own token, drawn while the draft still prefills
    UNPROFITABLE = "unprofitable"  # by what is measured, plain decoding is as fast
    LIMIT = "limit"  # one token is left to max_tokens or the context's end
    EMPTY = "empty"  # the drafter had no guess
    DOWN = "down"  # no draft service reachable
    TIMEOUT = "timeout"  # the draft did not answer within the round's deadline
    ERROR = "error"  # the draft answered with an error
    MALFORMED = "malformed"  # the target set the draft aside as breaking the contract


class FinishReason(enum.Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What the distribution at every position is made from. Ranges follow vLLM's; see `check`.

    `end_token_ids` are banned while fewer than `min_tokens` tokens are generated.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot at the argmax. Below 1e-5 float32 logits divided by it say nothing more."""
        return self.temperature < 1e-5

    def check(self, *, vocab_size: int) -> None:
        """Raise ValueError, naming the field, where a value is outside its range."""
        ranges = (
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        )
        for name, value, low, high in ranges:
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be greater than 0")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise ValueError(f"repetition_penalty must be greater than 0, got {self.repetition_penalty}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, got {self.top_k}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        for name, ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("banned_token_ids", self.banned_token_ids),
            ("end_token_ids", self.end_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} holds token id {token_id}, outside the vocabulary of {vocab_size}")
        for token_id, bias in self.logit_bias:
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise ValueError(f"logit_bias of token {token_id} must be between -100 and 100, got {bias}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Everything a model service must know to continue one text.

    `token_ids` is the prompt and, for a session reopened in mid-answer, what was generated so far;
    `prompt_length` says where the prompt ends. `num_logprobs` asks the target for log-probabilities of every token and
    of so many most likely ones; `prompt_logprobs` for the prompt's too. `next_laws` asks it for what its draft head
    says, where it has one.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    verification: Verification = Verification.REJECTION
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    next_laws: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class PackedLaw:
    """Sparse draft law as it crosses the wire: little-endian uint32 sizes and ids, float32 probabilities."""

    sizes: bytes
    token_ids: bytes
    probs: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.sizes) + len(self.token_ids) + len(self.probs)


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens and the law they were drawn from; `law` is None for a deterministic drafter (one-hot)."""

    token_ids: tuple[int, ...]
    law: PackedLaw | None = None

    @property
    def num_bytes(self) -> int:
        """As it crosses the wire, a few bytes of framing less."""
        return 4 * len(self.token_ids) + (0 if self.law is None else self.law.num_bytes)


NO_DRAFT = Draft(())


@dataclass(frozen=True, slots=True)
class DraftWish:
    """How far to draft: at most `num_draft_tokens`, and none that is, with those before it, less likely to stand than
    its position's of `least_certainties` (the last one goes for all behind it), as far as the drafter can tell. None:
    as it thinks best. `next_law`: of the first token to draft, as the target's draft head has it (Verdict.next_law)."""

    num_draft_tokens: int
    least_certainties: tuple[float, ...] = ()
    next_law: PackedLaw | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The raw model's log-probability of a token, and the most likely tokens in its place, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """Where a service spent its part of a round.

    `round_seconds[k]` is what a forward would take now if each of the `num_sequences` that shared the last one had k
    drafted tokens; empty where that is not known.
    """

    queue_seconds: float = 0.0
    forward_seconds: float = 0.0
    num_sequences: int = 1
    round_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft, maybe empty, and what it took. `prepared`: all of it was there when it was asked for."""

    draft: Draft
    times: ServiceTimes = field(default_factory=ServiceTimes)
    prepared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The target's answer to one round: the first `num_accepted` drafted tokens stand, then comes `token_id`.

    `draft_error` is set when the draft broke the contract and was set aside; the round was then draftless. `next_law`:
    what may follow `token_id`, one position, likeliest first, not summing to 1; None: not asked for, or not known.
    """

    num_accepted: int
    token_id: int
    origin: TokenOrigin
    draft_error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of the emitted tokens, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's second to last token, with the first verdict
    next_law: PackedLaw | None = None
    times: ServiceTimes = field(default_factory=ServiceTimes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Identity of a model. `tokenizer_fingerprint` is empty for what works with any tokenizer."""

    model_id: str
    revision: str
    vocab_size: int
    tokenizer_fingerprint: str
    context_length: int
    device: str
    dtype: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """What all sessions of a service together can have in its cache; each holds whole blocks of `block_size` tokens."""

    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a target service says of itself; `kv_cache` is None where it does not say."""

    model: ModelInfo
    end_token_ids: tuple[int, ...]
    max_sessions: int
    kv_cache: KvCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """What a draft service says of itself; `model` is None when no drafter needs one."""

    model: ModelInfo | None
    drafters: tuple[str, ...]
    default_drafter: str
    max_draft_tokens: int
    max_sessions: int

    @property
    def name(self) -> str:
        """What it drafts with: its model's id, or its drafters where none needs a model."""
        return ",".join(self.drafters) if self.model is None else self.model.model_id
