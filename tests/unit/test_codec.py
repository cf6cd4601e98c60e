"""Types to protobuf messages and back: nothing lost, nothing let through that breaks the contract."""

from __future__ import annotations

import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import InternalError, InvalidRequest, TandemError
from tandem.rpc import codec
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

SEEDED = settings(max_examples=60, deadline=None, derandomize=True, database=None)
VOCAB = 1_000

IDS = st.integers(0, 2**32 - 1)
ID_TUPLES = st.lists(IDS, max_size=8).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
TEXT = st.text(max_size=20)

SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOATS,
    top_k=st.integers(0, 2**32 - 1),
    top_p=FLOATS,
    min_p=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    repetition_penalty=FLOATS,
    logit_bias=st.dictionaries(IDS, FLOATS, max_size=5).map(lambda bias: tuple(sorted(bias.items()))),
    banned_token_ids=ID_TUPLES,
    min_tokens=st.integers(0, 2**32 - 1),
    end_token_ids=ID_TUPLES,
)
STARTS = st.builds(
    SessionStart,
    token_ids=st.lists(IDS, min_size=1, max_size=8).map(tuple),
    prompt_length=st.just(1),
    sampling=SAMPLING,
    seed=st.integers(0, 2**64 - 1),
    request_id=TEXT,
    verification=st.sampled_from(Verification),
)
KV_CACHES = st.builds(KvCache, num_blocks=st.integers(1, 2**32 - 1), block_size=st.integers(1, 2**32 - 1))
MODELS = st.builds(
    ModelInfo,
    model_id=TEXT,
    revision=TEXT,
    vocab_size=IDS,
    tokenizer_fingerprint=TEXT,
    context_length=IDS,
    device=TEXT,
    dtype=TEXT,
    engine=TEXT,
)

START = SessionStart(token_ids=(5, 6, 7), prompt_length=2, sampling=SamplingParams(), seed=9)


def over_the_wire(message: common_pb2.OpenSession) -> common_pb2.OpenSession:
    return common_pb2.OpenSession.FromString(message.SerializeToString())


def test_ids_are_packed_as_little_endian_uint32() -> None:
    assert codec.pack_ids([1, 256, 2**32 - 1]) == b"\x01\0\0\0" + b"\0\x01\0\0" + b"\xff\xff\xff\xff"
    assert codec.pack_ids([]) == b""


@SEEDED
@given(token_ids=ID_TUPLES)
def test_ids_come_back(token_ids: tuple[int, ...]) -> None:
    assert codec.unpack_ids(codec.pack_ids(token_ids), field="x") == token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 9])
def test_a_length_that_cannot_be_ids_is_refused_with_the_fields_name(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"advance.token_ids .* got {length} bytes") as refused:
        codec.unpack_ids(b"\0" * length, field="advance.token_ids")
    assert refused.value.param == "advance.token_ids"


@SEEDED
@given(start=STARTS)
def test_a_sessions_start_comes_back(start: SessionStart) -> None:
    """Every field is drawn, so one that the codec forgets shows."""
    assert codec.start_from_pb(over_the_wire(codec.start_to_pb(start)), vocab_size=None) == start


def test_no_field_of_sampling_params_or_session_start_is_left_at_its_default_by_the_strategies() -> None:
    """Guards the test above: a new field must be drawn there too. The target's own three have their test below."""
    sampling = codec.sampling_to_pb(SamplingParams())
    assert {field.name for field in fields(SamplingParams)} == {field.name for field in sampling.DESCRIPTOR.fields}
    session = {field.name for field in common_pb2.OpenSession.DESCRIPTOR.fields}
    assert {field.name for field in fields(SessionStart)} == session | {"num_logprobs", "prompt_logprobs", "next_laws"}


@SEEDED
@given(
    start=STARTS,
    num_logprobs=st.none() | st.integers(0, codec.MAX_LOGPROBS),
    prompt_logprobs=st.booleans(),
    next_laws=st.booleans(),
)
def test_the_targets_opening_comes_back(
    start: SessionStart, num_logprobs: int | None, prompt_logprobs: bool, next_laws: bool
) -> None:
    """0 log-probabilities (the token's own only) and none at all are different wishes."""
    start = replace(
        start,
        token_ids=(1, 2),
        sampling=SamplingParams(),
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs and num_logprobs is not None,
        next_laws=next_laws,
    )
    message = target_pb2.TargetOpen.FromString(codec.target_open_to_pb(start).SerializeToString())
    assert codec.target_open_from_pb(message, vocab_size=VOCAB) == start


def test_log_probabilities_are_bounded_and_the_prompts_need_a_number() -> None:
    for changes, param in (
        ({"num_logprobs": codec.MAX_LOGPROBS + 1}, "num_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
    ):
        message = target_pb2.TargetOpen(session=codec.start_to_pb(START))
        for name, value in changes.items():
            setattr(message, name, value)
        with pytest.raises(InvalidRequest) as refused:
            codec.target_open_from_pb(message, vocab_size=VOCAB)
        assert refused.value.param == param


def test_numbers_cross_as_float32_the_same_for_draft_and_target() -> None:
    """0.7 has no exact float32; the nearest one is what both services use."""
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, logit_bias=((3, 0.3),))
    arrived = codec.sampling_from_pb(codec.sampling_to_pb(params))
    assert arrived.temperature == float(np.float32(0.7))
    assert arrived.top_p == float(np.float32(0.9))
    assert arrived.logit_bias == ((3, float(np.float32(0.3))),)


def test_limits_of_the_ranges_are_still_within_them_on_the_other_side() -> None:
    for params in (
        SamplingParams(temperature=2.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0),
        SamplingParams(temperature=1e-5, top_p=1e-30, logit_bias=((0, -100.0), (1, 100.0))),
        SamplingParams(temperature=1e-300, top_p=0.9999999999, top_k=2**31, repetition_penalty=1e-30),
    ):
        params.check(vocab_size=VOCAB)
        codec.sampling_from_pb(codec.sampling_to_pb(params)).check(vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": b""}, "token_ids"),
        ({"token_ids": b"\0" * 7}, "token_ids"),
        ({"token_ids": struct.pack("<3I", 1, VOCAB, 2)}, "token_ids"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 4}, "prompt_length"),
        ({"verification": 99}, "verification"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1.0, top_p=1.0, repetition_penalty=1.0)}, "sampling"),
        ({"sampling": common_pb2.SamplingParams(top_p=0.0, repetition_penalty=1.0)}, "sampling"),
        ({"sampling": common_pb2.SamplingParams(top_p=float("nan"), repetition_penalty=1.0)}, "sampling"),
        ({"sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=0.0)}, "sampling"),
        (
            {"sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0, banned_token_ids=b"123")},
            "banned_token_ids",
        ),
        (
            {"sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0, end_token_ids=b"12345")},
            "end_token_ids",
        ),
        (
            {"sampling": common_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0, logit_bias={VOCAB: 1.0})},
            "sampling",
        ),
    ],
)
def test_an_opening_that_breaks_the_contract_is_refused_with_the_fields_name(
    changes: dict[str, object], param: str
) -> None:
    message = codec.start_to_pb(START)
    for name, value in changes.items():
        if isinstance(value, common_pb2.SamplingParams):
            message.sampling.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest) as refused:
        codec.start_from_pb(message, vocab_size=VOCAB)
    assert refused.value.param == param


def test_an_opening_without_any_field_is_refused_and_not_taken_for_defaults() -> None:
    for message in (common_pb2.OpenSession(), common_pb2.OpenSession(token_ids=codec.pack_ids([1]), prompt_length=1)):
        with pytest.raises(InvalidRequest):
            codec.start_from_pb(message, vocab_size=VOCAB)


def test_an_unspecified_verification_is_rejection() -> None:
    message = codec.start_to_pb(START)
    message.verification = common_pb2.VERIFICATION_UNSPECIFIED
    assert codec.start_from_pb(message, vocab_size=VOCAB).verification is Verification.REJECTION


def test_every_verification_and_origin_has_its_own_number() -> None:
    assert set(codec._VERIFICATION_TO_PB) == set(Verification)
    assert set(codec._ORIGIN_TO_PB) == set(TokenOrigin)
    assert 0 not in codec._ORIGIN_TO_PB.values()
    for table in (codec._VERIFICATION_TO_PB, codec._ORIGIN_TO_PB):
        assert len(set(table.values())) == len(table)


def test_ids_are_checked_against_the_vocabulary() -> None:
    codec.check_ids([], vocab_size=1)
    codec.check_ids([0, VOCAB - 1], vocab_size=VOCAB)
    with pytest.raises(InvalidRequest, match="1000, outside the vocabulary of 1000"):
        codec.check_ids([0, VOCAB, 3], vocab_size=VOCAB)


LAWS = st.none() | st.builds(PackedLaw, st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))


@SEEDED
@given(token_ids=ID_TUPLES, law=LAWS)
def test_a_draft_comes_back_with_its_law_byte_for_byte(token_ids: tuple[int, ...], law: PackedLaw | None) -> None:
    """No law (a deterministic draft) is not an empty one. Whether a law is sound is not asked here."""
    draft = Draft(token_ids, law)
    message = common_pb2.Draft.FromString(codec.draft_to_pb(draft).SerializeToString())
    back = codec.draft_from_pb(message)
    if law == PackedLaw(b"", b"", b""):
        assert back.token_ids == token_ids
    else:
        assert back == draft


def test_a_draft_whose_ids_have_a_wrong_length_is_refused_with_the_fields_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        codec.draft_from_pb(common_pb2.Draft(token_ids=b"12345"))
    assert refused.value.param == "draft.token_ids"


LOGPROBS = st.integers(0, 3).flatmap(
    lambda num_top: st.lists(
        st.builds(
            TokenLogprob, FLOATS, st.lists(st.tuples(IDS, FLOATS), min_size=num_top, max_size=num_top).map(tuple)
        ),
        max_size=4,
    ).map(tuple)
)


@SEEDED
@given(
    verdict=st.builds(
        Verdict,
        num_accepted=IDS,
        token_id=IDS,
        origin=st.sampled_from(TokenOrigin),
        draft_error=st.none() | st.text(min_size=1, max_size=20),
        logprobs=LOGPROBS,
        prompt_logprobs=LOGPROBS,
        times=st.builds(ServiceTimes, queue_seconds=FLOATS, forward_seconds=FLOATS),
        next_law=LAWS,
    ),
    length=IDS,
)
def test_a_verdict_comes_back(verdict: Verdict, length: int) -> None:
    sent = codec.verdict_to_pb(verdict, length=length).SerializeToString()
    message = target_pb2.VerifyResponse.FromString(sent)
    assert message.length == length
    assert codec.verdict_from_pb(message) == verdict


@pytest.mark.parametrize(
    "message",
    [
        target_pb2.VerifyResponse(token_id=1),
        target_pb2.VerifyResponse(token_id=1, origin=77),  # type: ignore[arg-type]  # proto3 enums are open
        target_pb2.VerifyResponse(origin=1, logprobs=target_pb2.Logprobs(token_logprobs=b"12345")),  # type: ignore[arg-type]
        target_pb2.VerifyResponse(
            origin=1,  # type: ignore[arg-type]
            logprobs=target_pb2.Logprobs(token_logprobs=b"1234", num_top=1, top_token_ids=b"12345678"),
        ),
        target_pb2.VerifyResponse(
            origin=1,  # type: ignore[arg-type]
            logprobs=target_pb2.Logprobs(
                token_logprobs=b"1234", num_top=2, top_token_ids=b"1234", top_logprobs=b"1234"
            ),
        ),
    ],
    ids=["no origin", "an unknown origin", "half a number", "ids without numbers", "fewer than announced"],
)
def test_a_verdict_that_makes_no_sense_is_the_targets_fault(message: target_pb2.VerifyResponse) -> None:
    """As from a service of another version: an error of our own tree that says so, not a KeyError."""
    with pytest.raises(TandemError) as fault:
        codec.verdict_from_pb(message)
    assert type(fault.value) is InternalError


@SEEDED
@given(
    info=st.builds(TargetInfo, model=MODELS, end_token_ids=ID_TUPLES, max_sessions=IDS, kv_cache=st.none() | KV_CACHES)
)
def test_a_targets_description_comes_back(info: TargetInfo) -> None:
    sent = codec.target_info_to_pb(info).SerializeToString()
    assert codec.target_info_from_pb(target_pb2.TargetServiceDescribeResponse.FromString(sent)) == info


@SEEDED
@given(
    info=st.builds(
        DraftInfo,
        model=st.none() | MODELS,
        drafters=st.lists(TEXT, max_size=3).map(tuple),
        default_drafter=TEXT,
        max_draft_tokens=IDS,
        max_sessions=IDS,
    )
)
def test_a_drafts_description_comes_back(info: DraftInfo) -> None:
    sent = codec.draft_info_to_pb(info).SerializeToString()
    assert codec.draft_info_from_pb(draft_pb2.DraftServiceDescribeResponse.FromString(sent)) == info
