"""One request, from its parsed body to the deltas of its answers.

1. `completion` or `chat` turns the body into a Job: prompts as token ids, sampling, where answers end, how to
   speculate. Everything that can be wrong with a request is found here, before anything is started.
2. `run` waits for the request's turn, then runs one speculative loop per answer and yields what they grow by.
3. However it ends, sessions are closed, places are given back and the answer is counted: all in `finally`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from gateway.answer import Answer, AnswerRules, Delta, SpeculationTally
from gateway.metrics import GatewayMetrics, Outcome
from gateway.schemas import ChatBody, CompletionBody, GenerationBody, Speculation
from gateway.served import Backends, ServedModel
from gateway.settings import Settings
from gateway.speculate import SpeculationPlan, speculate
from tandem.errors import ContextTooLong, InternalError, InvalidRequest, Overloaded, TimedOut, Unavailable
from tandem.types import SamplingParams, SessionStart

_Result = TypeVar("_Result")

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context
_INLINE_CHARS = 4_000  # tokenising so much takes about a millisecond; more goes to a thread


class Admission:
    """Places for answers, and one queue, first come first served. All answers to one request start together."""

    def __init__(self, *, max_running: int, max_queued: int) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        self.draining = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def drain(self) -> None:
        """Take no more requests. Those that run or wait go on."""
        self.draining = True

    async def idle(self, *, within_seconds: float) -> bool:
        """Whether nothing runs and nothing waits, as soon as that is so, or after the time given."""
        try:
            async with asyncio.timeout(within_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def acquire(self, count: int) -> None:
        """Wait for `count` places. Raises Overloaded or Unavailable at once. Cancelling it leaves the queue."""
        if self.draining:
            raise Unavailable("the gateway is shutting down")
        if not self._queue and self.running + count <= self._max_running:
            self._take(count)
            return
        if len(self._queue) >= self._max_queued:
            raise Overloaded(f"{self.running} answers are running and {len(self._queue)} requests are waiting already")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._queue.remove((count, turn))
                self._grant()  # the next in line may need less
            else:  # granted and cancelled in the same moment
                self.release(count)
            raise

    def release(self, count: int) -> None:
        self.running -= count
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self._max_running:
            count, turn = self._queue.popleft()
            self._take(count)
            turn.set_result(None)
        if not self.running:  # then the queue is empty too, as any request fits when nothing runs
            self._idle.set()

    def _take(self, count: int) -> None:
        self.running += count
        self._idle.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to be made."""

    start: SessionStart
    rules: AnswerRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that one request asks for."""

    served: ServedModel
    choices: tuple[Choice, ...]
    plan: SpeculationPlan
    seed: int  # as the request gave it, or drawn
    skip_special_tokens: bool
    tally: SpeculationTally
    arrived: float  # time.perf_counter()
    deadline: float  # of the event loop's clock

    @property
    def num_prompt_tokens(self) -> int:
        return sum(choice.start.prompt_length for choice in self.choices)


class Generation:
    """Makes jobs and runs them."""

    def __init__(
        self, *, settings: Settings, backends: Backends, metrics: GatewayMetrics, admission: Admission
    ) -> None:
        self._settings = settings
        self._backends = backends
        self._metrics = metrics
        self._admission = admission

    async def completion(self, body: CompletionBody, *, request_id: str, arrived: float) -> Job:
        """Raises InvalidRequest, ContextTooLong, and Unavailable while no target is known."""
        served = self._backends.served()
        prompts = body.prompts
        if len(prompts) > self._settings.max_n:
            raise InvalidRequest(f"at most {self._settings.max_n} prompts in one request", param="prompt")
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
        return self._job(
            body, served, token_ids, param="prompt", default=_COMPLETION_TOKENS, request_id=request_id, arrived=arrived
        )

    async def chat(self, body: ChatBody, *, request_id: str, arrived: float) -> Job:
        """Raises InvalidRequest, ContextTooLong, and Unavailable while no target is known."""
        served = self._backends.served()
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
        seed = secrets.randbits(63) if body.seed is None else body.seed
        choices: list[Choice] = []
        for token_ids in prompts:
            max_tokens = self._max_tokens(body, served, num_prompt_tokens=len(token_ids), default=default, param=param)
            start = SessionStart(
                token_ids=token_ids,
                prompt_length=len(token_ids),
                sampling=sampling,
                seed=seed % 2**64,  # negative seeds wrap, as the wire has unsigned ones
                request_id=request_id,
            )
            rules = AnswerRules(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                end_token_ids=frozenset(sampling.end_token_ids),
                stops=body.stops,
                include_stop=body.include_stop_str_in_output,
            )
            choices.append(Choice(start=start, rules=rules))
        return Job(
            served=served,
            choices=tuple(choices),
            plan=plan,
            seed=seed,
            skip_special_tokens=body.skip_special_tokens,
            tally=SpeculationTally(num_draft_tokens=plan.num_draft_tokens),
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
        wanted = self._settings.num_draft_tokens if wish.num_draft_tokens == "auto" else wish.num_draft_tokens
        if wanted > most:
            raise InvalidRequest(
                f"speculation.num_draft_tokens must be at most {most}, got {wanted}",
                param="speculation.num_draft_tokens",
            )
        info = self._backends.draft_info
        if info is not None:
            if wish.drafter not in ("auto", *info.drafters):
                raise InvalidRequest(
                    f"speculation.drafter must be auto or one of {', '.join(info.drafters)}",
                    param="speculation.drafter",
                )
            wanted = min(wanted, info.max_draft_tokens)
        return SpeculationPlan(num_draft_tokens=wanted, drafter="" if wish.drafter == "auto" else wish.drafter)

    async def run(self, job: Job) -> AsyncGenerator[tuple[int, Delta]]:
        """What the answers grow by, each delta with its answer's number. Raises TandemError.

        Close it (`aclosing`) to stop: sessions and places are given back before `aclose` returns.
        """
        await self._in_time(self._admission.acquire(len(job.choices)), job)
        try:
            if len(job.choices) == 1:
                async with aclosing(self._answer(job, job.choices[0])) as deltas:
                    async for delta in deltas:
                        yield 0, delta
            else:
                async with aclosing(self._merged(job)) as merged:
                    async for index, delta in merged:
                        yield index, delta
            if (length := job.tally.acceptance_length) is not None:
                self._metrics.observe_acceptance_length(length)
        finally:
            self._admission.release(len(job.choices))

    async def _answer(self, job: Job, choice: Choice) -> AsyncGenerator[Delta]:
        """One answer. The last delta comes when the sessions are closed already."""
        answer = Answer(choice.rules, job.served.tokenizer.detokenizer(skip_special_tokens=job.skip_special_tokens))
        outcome: Outcome = "cancelled"
        first_at = last_at = time.perf_counter()
        try:
            self._metrics.observe_prompt(choice.start.prompt_length)
            rounds = speculate(
                choice.start,
                max_length=choice.start.prompt_length + choice.rules.max_tokens,
                plan=job.plan,
                target=self._backends.target,
                drafts=self._backends.drafts,
            )
            async with aclosing(rounds):
                while True:
                    result = await self._in_time(anext(rounds), job)
                    is_first = answer.num_tokens == 0
                    last_at = time.perf_counter()
                    if is_first:
                        first_at = last_at
                        self._metrics.observe_first_token(first_at - job.arrived)
                    self._metrics.observe_round(result, is_first=is_first)
                    job.tally.add(result)
                    delta = answer.consume(result)
                    if answer.finish_reason is not None:
                        break
                    if delta is not None:
                        yield delta
            self._metrics.observe_dropped(answer.num_accepted_dropped)
            outcome = answer.finish_reason.value
            if delta is not None:
                yield delta
        except Exception:
            outcome = "error"
            raise
        finally:
            self._metrics.observe_answer(outcome, num_tokens=answer.num_tokens, seconds_after_first=last_at - first_at)

    async def _merged(self, job: Job) -> AsyncGenerator[tuple[int, Delta]]:
        """All answers at once, their deltas as they come. The first to fail ends all."""
        queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=len(job.choices))

        async def pump(index: int, choice: Choice) -> None:
            try:
                async with aclosing(self._answer(job, choice)) as deltas:
                    async for delta in deltas:
                        await queue.put((index, delta))
            except Exception as error:  # noqa: BLE001 (raised again by who reads the queue)
                await queue.put(error)

        pumps = [asyncio.create_task(pump(index, choice)) for index, choice in enumerate(job.choices)]
        try:
            unfinished = len(pumps)
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _in_time(self, work: Awaitable[_Result], job: Job) -> _Result:
        """Raises TimedOut at the request's deadline."""
        try:
            async with asyncio.timeout_at(job.deadline):
                return await work
        except TimeoutError:
            seconds = self._settings.request_timeout_seconds
            raise TimedOut(f"the answer was not complete within {seconds:g} s") from None
        except StopAsyncIteration:
            raise InternalError("the rounds ended before the answer did") from None


def _sampling(body: GenerationBody, served: ServedModel) -> SamplingParams:
    """The law's parameters, the ids that end the answer among them. Raises InvalidRequest, with the field's name."""
    if any(token_id >= served.vocab_size for token_id in body.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids must be from 0 to {served.vocab_size - 1}", param="stop_token_ids")
    own_ends = () if body.ignore_eos else served.info.end_token_ids
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
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
