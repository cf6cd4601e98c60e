"""From a request's parsed body to a Job: prompts as token ids, sampling, where answers end, how to speculate.

Everything that can be wrong with a request is found here, before anything is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.answer import AnswerRules, SpeculationTally
from gateway.echo import Echo, echo_of
from gateway.fields import Speculation
from gateway.kv_room import AnswerSize, check_room
from gateway.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.seeds import draw_seed, seed_of_choice
from gateway.served import Backends, ServedModel
from gateway.settings import Settings
from gateway.speculate import SpeculationPlan
from tandem.errors import ContextTooLong, InvalidRequest
from tandem.types import DraftInfo, SamplingParams, SessionStart, TokenLogprob, Verification

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context
_INLINE_CHARS = 4_000  # tokenising so much takes about a millisecond; more goes to a thread
_INLINE_TOKENS = 2_000  # and so does decoding so many
# float32, in which laws are made, has no smaller normal numbers. A set of tokens whose mass must reach this holds the
# most likely ones alone, as with any top_p below, so the law stays the same.
_LEAST_TOP_P = 1e-37


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to be made: number `sample` to the job's prompt number `prompt`."""

    start: SessionStart
    rules: AnswerRules
    prompt: int
    sample: int
    size: AnswerSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that one request asks for. `tally` and `prompt_logprobs` are filled while it runs."""

    served: ServedModel
    choices: tuple[Choice, ...]
    plan: SpeculationPlan
    seed: int  # as the request gave it, or drawn
    verification: Verification
    echoes: tuple[Echo, ...] = ()  # of each prompt, where the answers begin with it
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)  # by prompt, where asked for
    skip_special_tokens: bool
    tally: SpeculationTally
    arrived: float  # time.perf_counter()
    deadline: float  # of the event loop's clock

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return sum(choice.start.prompt_length for choice in self.choices if choice.sample == 0)


class JobMaker:
    """Makes jobs of what the served model and the settings allow."""

    def __init__(self, *, settings: Settings, backends: Backends) -> None:
        self._settings = settings
        self._backends = backends

    async def completion(self, body: CompletionBody, *, request_id: str, arrived: float) -> Job:
        """Raises InvalidRequest, ContextTooLong, and Unavailable while no target is known."""
        served = self._backends.served()
        prompts = body.prompts
        self._check_number(body, num_prompts=len(prompts))
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            num_chars = sum(map(len, texts))

            def encode() -> list[tuple[int, ...]]:
                return [served.tokenizer.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]

            token_ids = await self._tokenise(encode, num_chars=num_chars, served=served, param="prompt")
        else:
            token_ids = [tuple(prompt) for prompt in prompts if not isinstance(prompt, str)]
            if any(token_id >= served.vocab_size or token_id < 0 for prompt in token_ids for token_id in prompt):
                raise InvalidRequest(f"token ids must be from 0 to {served.vocab_size - 1}", param="prompt")
        job = self._job(
            body, served, token_ids, param="prompt", default=_COMPLETION_TOKENS, request_id=request_id, arrived=arrived
        )
        if not body.echo:
            return job

        def echo() -> tuple[Echo, ...]:
            given = [prompt if isinstance(prompt, str) else None for prompt in prompts]
            return tuple(
                echo_of(served.tokenizer, ids, given=text, skip_special_tokens=body.skip_special_tokens)
                for ids, text in zip(token_ids, given, strict=True)
            )

        small = sum(map(len, token_ids)) <= _INLINE_TOKENS
        return replace(job, echoes=echo() if small else await asyncio.to_thread(echo))

    async def chat(self, body: ChatBody, *, request_id: str, arrived: float) -> Job:
        """Raises InvalidRequest, ContextTooLong, and Unavailable while no target is known."""
        served = self._backends.served()
        self._check_number(body, num_prompts=1)
        messages = [message.model_dump() for message in body.messages]

        def encode() -> list[tuple[int, ...]]:
            text = served.tokenizer.render_chat(
                messages, add_generation_prompt=body.add_generation_prompt, variables=body.template_variables
            )
            return [served.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)]

        num_chars = sum(len(message.content) for message in body.messages)
        token_ids = await self._tokenise(encode, num_chars=num_chars, served=served, param="messages")
        return self._job(
            body, served, token_ids, param="messages", default=None, request_id=request_id, arrived=arrived
        )

    def _check_number(self, body: GenerationBody, *, num_prompts: int) -> None:
        most = self._settings.max_n
        if num_prompts > most:
            raise InvalidRequest(f"at most {most} prompts in one request", param="prompt")
        if num_prompts * body.n > most:
            raise InvalidRequest(
                f"at most {most} answers to one request; this one asks for {num_prompts * body.n} "
                f"(prompts: {num_prompts}, n: {body.n})",
                param="n",
            )

    async def _tokenise(
        self, encode: Callable[[], list[tuple[int, ...]]], *, num_chars: int, served: ServedModel, param: str
    ) -> list[tuple[int, ...]]:
        if num_chars > self._settings.max_prompt_chars:
            raise ContextTooLong(
                f"This model's maximum context length is {served.context_length} tokens. Your prompt has {num_chars} "
                f"characters, more than the {self._settings.max_prompt_chars} that this server tokenises.",
                param=param,
            )
        return encode() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(encode)

    def _job(
        self,
        body: GenerationBody,
        served: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        *,
        param: str,
        default: int | None,
        request_id: str,
        arrived: float,
    ) -> Job:
        plan = self._plan(body.speculation)
        sampling = _sampling(body, served)
        seed = draw_seed() if body.seed is None else body.seed
        verification = _verification(body)
        names_length = body.token_limit is not None or default is not None
        scores_prompt = isinstance(body, CompletionBody) and body.echo and body.num_logprobs is not None
        choices: list[Choice] = []
        for number, token_ids in enumerate(prompts):
            max_tokens = self._max_tokens(body, served, num_prompt_tokens=len(token_ids), default=default, param=param)
            rules = AnswerRules(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                end_token_ids=frozenset(sampling.end_token_ids),
                stops=body.stops,
                include_stop=body.include_stop_str_in_output,
            )
            size = AnswerSize(
                prompt=number,
                num_prompt_tokens=len(token_ids),
                num_answer_tokens=max_tokens if names_length else min(max_tokens, self._settings.assumed_answer_tokens),
            )
            for sample in range(body.n):
                start = SessionStart(
                    token_ids=token_ids,
                    prompt_length=len(token_ids),
                    sampling=sampling,
                    seed=seed_of_choice(seed, len(choices)),
                    verification=verification,
                    num_logprobs=body.num_logprobs,
                    prompt_logprobs=scores_prompt and sample == 0,
                    next_laws=plan.num_draft_tokens > 0,
                    request_id=request_id,
                )
                choices.append(Choice(start=start, rules=rules, prompt=number, sample=sample, size=size))
        check_room([choice.size for choice in choices], self._backends.known_replicas())
        return Job(
            served=served,
            choices=tuple(choices),
            plan=plan,
            seed=seed,
            verification=verification,
            skip_special_tokens=body.skip_special_tokens,
            tally=SpeculationTally(num_draft_tokens=plan.num_draft_tokens, keeps_rounds=body.speculation.trace),
            arrived=arrived,
            deadline=asyncio.get_running_loop().time() + self._settings.request_timeout_seconds,
        )

    def _max_tokens(
        self, body: GenerationBody, served: ServedModel, *, num_prompt_tokens: int, default: int | None, param: str
    ) -> int:
        """How long the answer may become. The messages begin with OpenAI's words, which clients look for."""
        context = f"This model's maximum context length is {served.context_length} tokens."
        room = served.context_length - num_prompt_tokens
        longest = self._settings.max_prompt_tokens
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        if longest is not None and num_prompt_tokens > longest:
            raise ContextTooLong(
                f"{context} This server takes prompts of at most {longest}. Your prompt has {num_prompt_tokens}.",
                param=param,
            )
        if room < 1:
            raise ContextTooLong(
                f"{context} Your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer.",
                param=param,
            )
        asked = body.token_limit
        if asked is not None and asked > room:
            raise ContextTooLong(
                f"{context} However, you requested {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the "
                f"prompt, {asked} for the answer). Please reduce the prompt or max_tokens.",
                param=param,
            )
        limit = min(room, room if default is None else default) if asked is None else asked
        if body.min_tokens > limit:
            raise InvalidRequest(
                f"min_tokens ({body.min_tokens}) must not exceed max_tokens ({limit})", param="min_tokens"
            )
        return limit

    def _plan(self, wish: Speculation) -> SpeculationPlan:
        if not wish.enabled:
            return SpeculationPlan(num_draft_tokens=0)
        most = self._settings.max_num_draft_tokens
        asked = self._settings.num_draft_tokens if wish.num_draft_tokens == "auto" else wish.num_draft_tokens
        wanted = most if asked == "auto" else asked
        if wanted > most:
            raise InvalidRequest(
                f"speculation.num_draft_tokens must be at most {most}, got {wanted}",
                param="speculation.num_draft_tokens",
            )
        info = self._backends.draft_info
        if info is not None:
            names = drafter_names(info)
            if wish.drafter not in names:
                raise InvalidRequest(
                    f"speculation.drafter must be one of {', '.join(names)}",
                    param="speculation.drafter",
                )
            wanted = min(wanted, info.max_draft_tokens)
        return SpeculationPlan(
            num_draft_tokens=wanted,
            drafter="" if wish.drafter == "auto" else wish.drafter,
            automatic=asked == "auto",
        )


def drafter_names(info: DraftInfo) -> tuple[str, ...]:
    """What `speculation.drafter` may be; a service with a model has one that is called "auto" itself."""
    return tuple(dict.fromkeys(("auto", *info.drafters)))


def _verification(body: GenerationBody) -> Verification:
    """The rule that the request names; "auto" couples where there is a seed.

    Plain decoding goes by it too: with a seed, its text is then the one that speculation gives.
    """
    wish = body.speculation.verification
    if wish == "auto":
        return Verification.REJECTION if body.seed is None else Verification.COUPLED
    return Verification(wish)


def _sampling(body: GenerationBody, served: ServedModel) -> SamplingParams:
    """The law's parameters, the ids that end the answer among them. Raises InvalidRequest, with the field's name."""
    if any(token_id >= served.vocab_size for token_id in body.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must be from 0 to {served.vocab_size - 1}", param="stop_token_ids")
    own_ends = () if body.ignore_eos else served.info.end_token_ids
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=max(body.top_p, _LEAST_TOP_P),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(sorted(body.logit_bias.items())),
        min_tokens=body.min_tokens,
        end_token_ids=tuple(sorted({*own_ends, *body.stop_token_ids})),
    )
    try:
        sampling.check(vocab_size=served.vocab_size)
    except ValueError as error:
        field, _, _ = str(error).partition(" ")  # each message begins with the field's name
        raise InvalidRequest(str(error), param=field) from error
    return sampling
