"""Fakes whose output can be computed by hand: a target and drafts that follow a script, a tiny real tokenizer, a fleet.

The model. A script says which tokens follow a prompt; the token at answer position i is script[i], and after the
script's end comes END for ever. The target accepts a drafted token if and only if it is the script's. So:

    script a b c d e f g, drafts always right, k = 3

    round 0  plain                     a            first token, no draft
    round 1  b c d accepted, e bonus   b c d e
    round 2  f g accepted, END accepted, END bonus

    drafts always wrong (each drafted token is the script's plus one): every round emits one recovered token
    drafts wrong where position % 3 == 2 (c, f): round 1 drafts b C d, accepts b, recovers c; round 2 drafts d e F, ...

`alphabet` is the script that needs no list: it goes on where the prompt stops, z followed by a: "abc" gives "defgh...".

Its log-probabilities, where asked for: of token id i, -i / 1000; so the n most likely tokens are the ids 0 to n - 1.

The tokenizer. Byte-level BPE in which token id = byte value below 256, then a few merges, then special tokens; so an
ASCII text without merges is its own bytes, and é is the two tokens C3 A9.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import tokenizers
import uvicorn
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers, processors

from gateway.backends import Proposal
from gateway.detokenize import byte_level_alphabet
from gateway.kv_room import Replica
from gateway.served import Readiness, ServedModel
from gateway.tokenizer import Tokenizer
from tandem.errors import Unavailable
from tandem.types import (
    NO_DRAFT,
    Draft,
    DraftInfo,
    DraftlessReason,
    DraftWish,
    ModelInfo,
    SessionStart,
    TargetInfo,
    TokenLogprob,
    TokenOrigin,
    Verdict,
)

Script = Callable[[SessionStart], Sequence[int]]

MERGES = ("t h", "th e", "Ġ the", "l l", "h e", "he ll", "Ã ©")  # ids 256 to 262; Ġ is a space, Ã © is é
BOS, START, END = 263, 264, 265
VOCAB_SIZE = 266
CONTEXT_LENGTH = 512
MODEL_ID = "tests/scripted"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{% if loop.index0 > 0 and messages[loop.index0 - 1]['role'] == message['role'] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}:{{ message['content'] }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def library_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer of the module's docstring, as the library has it."""
    chars = {byte: char for char, byte in byte_level_alphabet().items()}
    vocab = {chars[byte]: byte for byte in range(256)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    vocab |= {left + right: 256 + index for index, (left, right) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def tokenizer_files(*, chat_template: str | None = CHAT_TEMPLATE) -> dict[str, bytes]:
    """The files as a target service hands them over."""
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}}
    files = {
        "tokenizer.json": library_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return files


def text_ids(text: str) -> tuple[int, ...]:
    """Token ids of `text` without special tokens."""
    return tuple(library_tokenizer().encode(text, add_special_tokens=False).ids)


def alphabet(start: SessionStart) -> Sequence[int]:
    """Goes on in the alphabet after the prompt's last letter, long enough to fill any context."""
    last = start.token_ids[start.prompt_length - 1] - ord("a")
    return [ord("a") + (last + 1 + index) % 26 for index in range(2 * CONTEXT_LENGTH)]


def says(text: str) -> Script:
    """Answers every prompt with `text`, one token per byte, then END."""
    return lambda start: tuple(text.encode())


def tokens(*token_ids: int) -> Script:
    return lambda start: token_ids


def score_of(token_id: int, num_top: int) -> TokenLogprob:
    """The score of the module's docstring."""
    return TokenLogprob(-token_id / 1000, tuple((top, -top / 1000) for top in range(num_top)))


def _script_at(script: Sequence[int], position: int) -> int:
    return script[position] if position < len(script) else END


@dataclass
class ScriptedTarget:
    """Gateway's Target. `gate`, once set, lets calls pass; `fail_at` raises at the answer position given."""

    script: Script
    seconds: float = 0.0  # of every call
    gate: asyncio.Event | None = None
    fail_at: tuple[int, Exception] | None = None
    sends_scores: bool = True  # where it is asked to
    starts: list[SessionStart] = field(default_factory=list)
    num_open: int = 0
    num_calls: int = 0

    def open(self, start: SessionStart) -> _TargetSession:
        self.starts.append(start)
        self.num_open += 1
        return _TargetSession(self, start)


class _TargetSession:
    def __init__(self, target: ScriptedTarget, start: SessionStart) -> None:
        self._target = target
        self._start = start
        self._script = target.script(start)
        self._open = True

    async def first(self) -> Verdict:
        verdict = await self.verify(self._start.token_ids, NO_DRAFT)
        if not self._start.prompt_logprobs:
            return verdict
        return replace(verdict, prompt_logprobs=self._scores(self._start.token_ids[1:]))

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        target = self._target
        target.num_calls += 1
        if target.gate is not None:
            await target.gate.wait()
        await asyncio.sleep(target.seconds)
        position = len(token_ids) - self._start.prompt_length
        if target.fail_at is not None and position >= target.fail_at[0]:
            raise target.fail_at[1]
        accepted = 0
        for token_id in draft.token_ids:
            if token_id != _script_at(self._script, position + accepted):
                break
            accepted += 1
        token_id = _script_at(self._script, position + accepted)
        origin = TokenOrigin.BONUS if accepted == len(draft.token_ids) else TokenOrigin.RECOVERED
        return Verdict(
            num_accepted=accepted,
            token_id=token_id,
            origin=origin if draft.token_ids else TokenOrigin.PLAIN,
            logprobs=self._scores((*draft.token_ids[:accepted], token_id)),
        )

    def _scores(self, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        num_top = self._start.num_logprobs
        if num_top is None or not self._target.sends_scores:
            return ()
        return tuple(score_of(token_id, num_top) for token_id in token_ids)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._target.num_open -= 1


def never(position: int) -> bool:
    return False


def always(position: int) -> bool:
    return True


@dataclass
class ScriptedDrafts:
    """Gateway's Drafts: guesses the script, plus one where `wrong_at` says so of the answer position."""

    script: Script
    wrong_at: Callable[[int], bool] = never
    down: DraftlessReason | None = None  # answer every propose with this reason in place of a draft
    num_bytes: int = 0  # per drafted token
    num_open: int = 0
    asked: list[int] = field(default_factory=list)  # num_draft_tokens of every propose
    drafters: list[str] = field(default_factory=list)  # of every open

    def open(self, start: SessionStart, *, drafter: str) -> _DraftSession:
        self.num_open += 1
        self.drafters.append(drafter)
        return _DraftSession(self, start)


class _DraftSession:
    def __init__(self, drafts: ScriptedDrafts, start: SessionStart) -> None:
        self._drafts = drafts
        self._start = start
        self._script = drafts.script(start)
        self._open = True

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Proposal:
        drafts, num_draft_tokens = self._drafts, wish.num_draft_tokens
        drafts.asked.append(num_draft_tokens)
        await asyncio.sleep(0)
        if drafts.down is not None:
            return Proposal(NO_DRAFT, drafts.down)
        begin = len(token_ids) - self._start.prompt_length
        guesses = tuple(
            (_script_at(self._script, position) + drafts.wrong_at(position)) % VOCAB_SIZE
            for position in range(begin, begin + num_draft_tokens)
        )
        return Proposal(Draft(guesses), num_bytes=drafts.num_bytes * len(guesses))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._drafts.num_open -= 1


TARGET_INFO = TargetInfo(
    model=ModelInfo(
        model_id=MODEL_ID,
        revision="1",
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint="f",
        context_length=CONTEXT_LENGTH,
        device="cpu",
        dtype="float32",
        engine="script",
    ),
    end_token_ids=(END,),
    max_sessions=64,
)
DRAFT_INFO = DraftInfo(
    model=None, drafters=("script", "ngram"), default_drafter="script", max_draft_tokens=16, max_sessions=64
)


def served_model(*, chat_template: str | None = CHAT_TEMPLATE) -> ServedModel:
    tokenizer = Tokenizer.from_files(tokenizer_files(chat_template=chat_template))
    return ServedModel(info=TARGET_INFO, tokenizer=tokenizer, created=1_700_000_000)


@dataclass
class FakeFleet:
    """gateway.served.Backends without a network."""

    target: ScriptedTarget
    drafts: ScriptedDrafts
    model: ServedModel | None = field(default_factory=served_model)
    draft_info: DraftInfo | None = DRAFT_INFO
    state: Readiness = Readiness("ready")  # noqa: RUF009 (frozen)
    calls: list[str] = field(default_factory=list)
    targets: Sequence[Replica] = ()  # by what admission goes
    placed: list[str | None] = field(default_factory=list)  # of each answer, where it was to begin

    @classmethod
    def following(cls, script: Script, *, wrong_at: Callable[[int], bool] = never) -> FakeFleet:
        """Target and drafts of one script."""
        return cls(target=ScriptedTarget(script), drafts=ScriptedDrafts(script, wrong_at=wrong_at))

    def served(self) -> ServedModel:
        if self.model is None:
            raise Unavailable("target 127.0.0.1:1: not reached yet")
        return self.model

    def readiness(self) -> Readiness:
        return self.state

    def target_at(self, address: str | None) -> ScriptedTarget:
        self.placed.append(address)
        return self.target

    def replicas(self) -> Sequence[Replica]:
        return self.targets

    def known_replicas(self) -> Sequence[Replica]:
        return self.targets

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """The application on a real uvicorn in this event loop; yields its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            app, http="httptools", log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def eventually(condition: Callable[[], bool], *, seconds: float = 2.0) -> None:
    """Wait until `condition` holds; AssertionError when it does not within `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.005)
