"""The only code that turns Tandem's types into protobuf messages and back. Packed arrays are little-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from tandem.errors import InternalError, InvalidRequest
from tandem.types import (
    Draft,
    DraftInfo,
    KvCache,
    ModelInfo,
    PackedLaw,
    SamplingParams,
    ServiceTimes,
    SessionStart,
    TargetInfo,
    TokenLogprob,
    TokenOrigin,
    Verdict,
    Verification,
)
from tandem.v1 import common_pb2, draft_pb2, target_pb2

MAX_LOGPROBS = 20  # most likely tokens per position: OpenAI's limit, and a bound on the answer's size

_ORIGIN_TO_PB = {
    TokenOrigin.ACCEPTED: target_pb2.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.RECOVERED: target_pb2.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.BONUS: target_pb2.TOKEN_ORIGIN_BONUS,
    TokenOrigin.PLAIN: target_pb2.TOKEN_ORIGIN_PLAIN,
}
_ORIGIN_FROM_PB = {value: origin for origin, value in _ORIGIN_TO_PB.items()}


_VERIFICATION_TO_PB = {
    Verification.REJECTION: common_pb2.VERIFICATION_REJECTION,
    Verification.COUPLED: common_pb2.VERIFICATION_COUPLED,
}
_VERIFICATION_FROM_PB = {
    common_pb2.VERIFICATION_UNSPECIFIED: Verification.REJECTION,
    **{value: verification for verification, value in _VERIFICATION_TO_PB.items()},
}


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes, *, field: str) -> tuple[int, ...]:
    """The inverse. Raises InvalidRequest, naming `field`, for a length that is no multiple of 4."""
    if len(packed) % 4:
        raise InvalidRequest(f"{field} must hold little-endian uint32 ids, got {len(packed)} bytes", param=field)
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        banned_token_ids=pack_ids(params.banned_token_ids),
        min_tokens=params.min_tokens,
        end_token_ids=pack_ids(params.end_token_ids),
    )


def sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        banned_token_ids=unpack_ids(message.banned_token_ids, field="banned_token_ids"),
        min_tokens=message.min_tokens,
        end_token_ids=unpack_ids(message.end_token_ids, field="end_token_ids"),
    )


def start_to_pb(start: SessionStart) -> common_pb2.OpenSession:
    return common_pb2.OpenSession(
        token_ids=pack_ids(start.token_ids),
        prompt_length=start.prompt_length,
        sampling=sampling_to_pb(start.sampling),
        seed=start.seed,
        request_id=start.request_id,
        verification=_VERIFICATION_TO_PB[start.verification],
    )


def target_open_to_pb(start: SessionStart) -> target_pb2.TargetOpen:
    return target_pb2.TargetOpen(
        session=start_to_pb(start),
        num_logprobs=start.num_logprobs,
        prompt_logprobs=start.prompt_logprobs,
        next_laws=start.next_laws,
    )


def target_open_from_pb(message: target_pb2.TargetOpen, *, vocab_size: int) -> SessionStart:
    """Raises InvalidRequest, naming the field."""
    num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
    if num_logprobs is not None and num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"num_logprobs must be at most {MAX_LOGPROBS}, got {num_logprobs}", param="num_logprobs")
    if message.prompt_logprobs and num_logprobs is None:
        raise InvalidRequest("prompt_logprobs needs num_logprobs", param="prompt_logprobs")
    start = start_from_pb(message.session, vocab_size=vocab_size)
    return replace(
        start, num_logprobs=num_logprobs, prompt_logprobs=message.prompt_logprobs, next_laws=message.next_laws
    )


def start_from_pb(message: common_pb2.OpenSession, *, vocab_size: int | None) -> SessionStart:
    """Raises InvalidRequest, naming the field. Without `vocab_size` the ids' range is not checked."""
    start = SessionStart(
        token_ids=unpack_ids(message.token_ids, field="token_ids"),
        prompt_length=message.prompt_length,
        sampling=sampling_from_pb(message.sampling),
        seed=message.seed,
        request_id=message.request_id,
        verification=_verification(message.verification),
    )
    if not start.token_ids:
        raise InvalidRequest("token_ids must not be empty", param="token_ids")
    if not 0 < start.prompt_length <= len(start.token_ids):
        raise InvalidRequest("prompt_length must be within token_ids", param="prompt_length")
    if vocab_size is not None:
        check_ids(start.token_ids, vocab_size=vocab_size)
        try:
            start.sampling.check(vocab_size=vocab_size)
        except ValueError as error:
            raise InvalidRequest(str(error), param="sampling") from error
    return start


def _verification(value: common_pb2.Verification.ValueType) -> Verification:
    if value not in _VERIFICATION_FROM_PB:  # proto3 enums are open
        raise InvalidRequest(f"verification {value} is not known here", param="verification")
    return _VERIFICATION_FROM_PB[value]


def check_ids(token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Raise InvalidRequest for an id outside the vocabulary."""
    if token_ids and max(token_ids) >= vocab_size:
        message = f"token_ids holds {max(token_ids)}, outside the vocabulary of {vocab_size}"
        raise InvalidRequest(message, param="token_ids")


def draft_to_pb(draft: Draft) -> common_pb2.Draft:
    return common_pb2.Draft(token_ids=pack_ids(draft.token_ids), law=law_to_pb(draft.law))


def draft_from_pb(message: common_pb2.Draft) -> Draft:
    law = law_from_pb(message.law) if message.HasField("law") else None
    return Draft(unpack_ids(message.token_ids, field="draft.token_ids"), law)


def law_to_pb(law: PackedLaw | None) -> common_pb2.DraftLaw | None:
    return None if law is None else common_pb2.DraftLaw(sizes=law.sizes, token_ids=law.token_ids, probs=law.probs)


def law_from_pb(message: common_pb2.DraftLaw) -> PackedLaw:
    """Not checked: what reads it does that (tandem/draft_law.py)."""
    return PackedLaw(message.sizes, message.token_ids, message.probs)


def verdict_to_pb(verdict: Verdict, *, length: int) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(
        num_accepted=verdict.num_accepted,
        token_id=verdict.token_id,
        origin=_ORIGIN_TO_PB[verdict.origin],
        length=length,
        draft_error=verdict.draft_error or "",
        queue_seconds=verdict.times.queue_seconds,
        forward_seconds=verdict.times.forward_seconds,
        logprobs=_logprobs_to_pb(verdict.logprobs),
        prompt_logprobs=_logprobs_to_pb(verdict.prompt_logprobs),
        num_sequences=verdict.times.num_sequences,
        round_seconds=_pack_floats(verdict.times.round_seconds),
        next_law=law_to_pb(verdict.next_law),
    )


def _pack_floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _unpack_floats(packed: bytes) -> tuple[float, ...]:
    """Raises struct.error for a length that is no multiple of 4."""
    return struct.unpack(f"<{len(packed) // 4}f", packed)


def _logprobs_to_pb(logprobs: Sequence[TokenLogprob]) -> target_pb2.Logprobs | None:
    if not logprobs:
        return None
    top = [pair for token in logprobs for pair in token.top]
    return target_pb2.Logprobs(
        token_logprobs=_pack_floats([token.logprob for token in logprobs]),
        num_top=len(logprobs[0].top),
        top_token_ids=pack_ids([token_id for token_id, _ in top]),
        top_logprobs=_pack_floats([logprob for _, logprob in top]),
    )


def _logprobs_from_pb(message: target_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    own = _unpack_floats(message.token_logprobs)
    ids = unpack_ids(message.top_token_ids, field="top_token_ids")
    values = _unpack_floats(message.top_logprobs)
    pairs = tuple(zip(ids, values, strict=True))
    n = message.num_top
    if len(pairs) != n * len(own):
        raise ValueError(f"{len(own)} tokens with {n} most likely ones each, but {len(pairs)} of these")
    return tuple(TokenLogprob(logprob, pairs[i * n : (i + 1) * n]) for i, logprob in enumerate(own))


def verdict_from_pb(message: target_pb2.VerifyResponse) -> Verdict:
    """Raises InternalError for what no target of this version sends."""
    try:
        return Verdict(
            num_accepted=message.num_accepted,
            token_id=message.token_id,
            origin=_ORIGIN_FROM_PB[message.origin],
            draft_error=message.draft_error or None,
            logprobs=_logprobs_from_pb(message.logprobs),
            prompt_logprobs=_logprobs_from_pb(message.prompt_logprobs),
            times=ServiceTimes(
                queue_seconds=message.queue_seconds,
                forward_seconds=message.forward_seconds,
                num_sequences=max(1, message.num_sequences),
                round_seconds=_unpack_floats(message.round_seconds),
            ),
            next_law=law_from_pb(message.next_law) if message.HasField("next_law") else None,
        )
    except (KeyError, ValueError, struct.error, InvalidRequest) as error:
        raise InternalError(f"the target's verdict makes no sense: {error!r}") from error


def model_to_pb(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        model_id=model.model_id,
        revision=model.revision,
        vocab_size=model.vocab_size,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        context_length=model.context_length,
        device=model.device,
        dtype=model.dtype,
        engine=model.engine,
    )


def model_from_pb(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model_id=message.model_id,
        revision=message.revision,
        vocab_size=message.vocab_size,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        context_length=message.context_length,
        device=message.device,
        dtype=message.dtype,
        engine=message.engine,
    )


def target_info_to_pb(info: TargetInfo) -> target_pb2.TargetServiceDescribeResponse:
    kv_cache = info.kv_cache
    return target_pb2.TargetServiceDescribeResponse(
        model=model_to_pb(info.model),
        end_token_ids=pack_ids(info.end_token_ids),
        max_sessions=info.max_sessions,
        kv_cache=None
        if kv_cache is None
        else target_pb2.KvCache(num_blocks=kv_cache.num_blocks, block_size=kv_cache.block_size),
    )


def target_info_from_pb(message: target_pb2.TargetServiceDescribeResponse) -> TargetInfo:
    return TargetInfo(
        model=model_from_pb(message.model),
        end_token_ids=unpack_ids(message.end_token_ids, field="end_token_ids"),
        max_sessions=message.max_sessions,
        kv_cache=_kv_cache_from_pb(message.kv_cache) if message.HasField("kv_cache") else None,
    )


def _kv_cache_from_pb(message: target_pb2.KvCache) -> KvCache | None:
    """None for what makes no sense, as for what is not there."""
    if not message.num_blocks or not message.block_size:
        return None
    return KvCache(num_blocks=message.num_blocks, block_size=message.block_size)


def draft_info_to_pb(info: DraftInfo) -> draft_pb2.DraftServiceDescribeResponse:
    return draft_pb2.DraftServiceDescribeResponse(
        model=None if info.model is None else model_to_pb(info.model),
        drafters=info.drafters,
        default_drafter=info.default_drafter,
        max_draft_tokens=info.max_draft_tokens,
        max_sessions=info.max_sessions,
    )


def draft_info_from_pb(message: draft_pb2.DraftServiceDescribeResponse) -> DraftInfo:
    return DraftInfo(
        model=model_from_pb(message.model) if message.HasField("model") else None,
        drafters=tuple(message.drafters),
        default_drafter=message.default_drafter,
        max_draft_tokens=message.max_draft_tokens,
        max_sessions=message.max_sessions,
    )
