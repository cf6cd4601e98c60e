"""OpenAI's documents and chunks.

One id, one `created` and one `model` per response. In a stream the role comes in a chat choice's first chunk only,
`finish_reason` is null until the choice's last chunk, and that chunk carries no text. A token's id, log-probability and
trace come in the chunk whose text it is released in. With `echo` a choice begins with its prompt; the prompt's
log-probabilities come with it. `speculation` stands at the top of the document or, in a stream, of the last chunk with
a finish_reason. What vLLM adds on request (token_ids, prompt_token_ids) stands where vLLM has it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.answer import AnswerToken, Delta
from gateway.jobs import Job
from gateway.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from gateway.schemas import ChatBody, GenerationBody
from gateway.sse import encode_event
from tandem.errors import InternalError
from tandem.types import FinishReason


@dataclass(slots=True)
class _Piece:
    """Part of a choice, or all of it: its text, its own tokens, and all its scored ones, an echo's among them."""

    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)


class Reply:
    """How the deltas of one job are written: OpenAI's document or chunks, for a chat or for completions."""

    def __init__(self, body: GenerationBody, job: Job, deltas: AsyncGenerator[tuple[int, Delta]]) -> None:
        self._body = body
        self._job = job
        self._deltas = deltas
        self._is_chat = isinstance(body, ChatBody)
        self._num_tokens = 0
        self._begun: set[int] = set()
        self._num_chars = [0] * len(job.choices)  # of each choice's text so far
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or job.served.model_id,
        }

    async def document(self) -> dict[str, Any]:
        """The whole response, once all answers are complete."""
        wholes = [_Piece() for _ in self._job.choices]
        reasons = [""] * len(self._job.choices)
        async with aclosing(self._deltas) as deltas:
            async for index, delta in deltas:
                piece = self._piece(index, delta)
                wholes[index].text += piece.text
                wholes[index].tokens += piece.tokens
                wholes[index].scored += piece.scored
                if delta.finish_reason is not None:
                    reasons[index] = delta.finish_reason.value
        choices: list[dict[str, Any]] = []
        for index, whole in enumerate(wholes):
            said = {"message": {"role": "assistant", "content": whole.text}} if self._is_chat else {"text": whole.text}
            choice = {"index": index, **said, "logprobs": self._logprobs(whole.scored, whole=True)}
            choice |= {"finish_reason": reasons[index]} | self._token_fields(whole.tokens)
            if not self._is_chat:
                choice |= self._prompt_ids(index)
            choices.append(choice)
        document = {**self._head, "choices": choices, "usage": self._usage(), "speculation": self._speculation()}
        if self._is_chat:
            document |= {"object": "chat.completion"} | self._prompt_ids(0)
        return document

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as a stream's events, the closing [DONE] not among them."""
        unfinished = len(self._job.choices)
        async with aclosing(self._deltas) as deltas:
            async for index, delta in deltas:
                is_first = index not in self._begun
                piece = self._piece(index, delta)
                if is_first and self._is_chat:
                    said = {"role": "assistant", "content": ""}
                    yield self._chunk(index, said, _Piece(), top=self._prompt_ids(index))
                extra = self._prompt_ids(index) if is_first and not self._is_chat else {}
                if piece.text:
                    yield self._chunk(index, piece.text, piece, extra=extra)
                    piece, extra = _Piece(), {}
                if delta.finish_reason is not None:
                    unfinished -= 1
                    top = {} if unfinished else {"speculation": self._speculation()}
                    yield self._chunk(index, "", piece, extra=extra, finish_reason=delta.finish_reason, top=top)
        if self._body.stream_options.include_usage:
            yield encode_event(self._stream_head() | {"choices": [], "usage": self._usage()})

    def _piece(self, index: int, delta: Delta) -> _Piece:
        """A delta as it is shown: a choice's first begins with the prompt where that is echoed."""
        piece = _Piece()
        if index not in self._begun and self._job.echoes:
            self._add_echo(piece, index)
        self._begun.add(index)
        self._num_tokens += len(delta.tokens)
        piece.text += delta.text
        piece.tokens += delta.tokens
        for token in delta.tokens:
            if self._body.num_logprobs is not None and token.logprob is None:
                raise InternalError("the target sent no log-probabilities")
            piece.scored.append(ScoredToken(token.token_id, self._num_chars[index], token.logprob))
            self._num_chars[index] += len(token.text)
        return piece

    def _add_echo(self, piece: _Piece, index: int) -> None:
        prompt = self._job.choices[index].prompt
        echo = self._job.echoes[prompt]
        piece.text = echo.text
        self._num_chars[index] = len(echo.text)
        if self._body.num_logprobs is not None:
            scores = (None, *self._job.prompt_logprobs[prompt])
            if len(scores) != len(echo.token_ids):
                raise InternalError("the target did not score the whole prompt")
            piece.scored += map(ScoredToken, echo.token_ids, echo.offsets, scores)

    def _chunk(
        self,
        index: int,
        said: str | dict[str, str],
        piece: _Piece,
        *,
        extra: dict[str, Any] | None = None,
        finish_reason: FinishReason | None = None,
        top: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk with one choice. `said` is text, or a chat's delta."""
        if self._is_chat:
            delta = said if isinstance(said, dict) else {"content": said} if said else {}
            choice: dict[str, Any] = {"index": index, "delta": delta}
        else:
            choice = {"index": index, "text": said}
        reason = None if finish_reason is None else finish_reason.value
        choice |= {"logprobs": self._logprobs(piece.scored), "finish_reason": reason}
        choice |= self._token_fields(piece.tokens) | (extra or {})
        chunk = self._stream_head() | {"choices": [choice]} | (top or {})
        options = self._body.stream_options
        if options.include_usage:
            chunk["usage"] = self._usage() if options.continuous_usage_stats else None
        return encode_event(chunk)

    def _stream_head(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def _logprobs(self, scored: Sequence[ScoredToken], *, whole: bool = False) -> dict[str, Any] | None:
        """Null where the request asks for none, and in chunks without tokens."""
        if self._body.num_logprobs is None or not (scored or whole):
            return None
        write = chat_logprobs if self._is_chat else completion_logprobs
        return write(self._job.served.tokenizer, scored)

    def _token_fields(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [token.token_id for token in tokens]
        if self._body.speculation.trace:
            fields["trace"] = [
                {
                    "token_id": token.token_id,
                    "text": token.text,
                    "origin": token.origin.value,
                    "round": token.round,
                    "position": token.position,
                    "drafted": token.num_drafted,
                }
                for token in tokens
            ]
        return fields

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.choices[index].start.token_ids} if self._body.return_token_ids else {}

    def _usage(self) -> dict[str, int]:
        """Tokens so far. The end token counts, what a round held beyond the end does not."""
        num_prompt = self._job.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _speculation(self) -> dict[str, Any]:
        return self._job.tally.report(seed=self._job.seed, verification=self._job.verification)
