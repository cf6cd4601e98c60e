"""Log-probabilities in OpenAI's two shapes.

They are the raw model's, before penalties, bias, temperature and truncation. Every alternative is decoded on its own:
decoded together, a part of a character would come out as nothing. JSON has no infinity: -9999.0 stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tokenizer import Tokenizer
from tandem.types import TokenLogprob

_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, where its text begins, and its score; a prompt's first token has none."""

    token_id: int
    offset: int
    score: TokenLogprob | None


def completion_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> dict[str, list[Any]]:
    """For /v1/completions. The token itself is always among its `top_logprobs`, as an entry more where need be.

    The alternatives are an object, so their names must differ: a token that is no whole text is named by its bytes,
    as OpenAI does (`bytes:\\xc3`). Of two tokens that spell the same text the more likely is shown.
    """
    names: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        name = _unique_name(tokenizer, token.token_id)
        names.append(name)
        offsets.append(token.offset)
        if token.score is None:
            values.append(None)
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in token.score.top:
            top.setdefault(_unique_name(tokenizer, token_id), _finite(logprob))
        value = top[name] = _finite(token.score.logprob)
        values.append(value)
        tops.append(top)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """For /v1/chat/completions: `top_logprobs` are exactly the most likely tokens, with the token or without."""
    content: list[dict[str, Any]] = []
    for token in tokens:
        assert token.score is not None, "only a prompt's first token is without a score"
        top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in token.score.top]
        content.append({**_entry(tokenizer, token.token_id, token.score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token_id) or f"token_id:{token_id}"
    return {"token": text, "logprob": _finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def _unique_name(tokenizer: Tokenizer, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode() or f"token_id:{token_id}"  # an id of the model that the tokenizer has no token for
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
