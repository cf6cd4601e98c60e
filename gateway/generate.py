"""A job's answers, from their turn in the queue to the last delta.

`run` waits for the request's turn, then runs one speculative loop per answer and yields what they grow by. Of several
answers to one prompt the first begins alone, and the others when it has its first token: they then find the prompt in
the target's prefix cache, where all at once would each compute it. However it ends, sessions are closed, places are
given back and the answer is counted: all in `finally`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from gateway.admission import Admission, Grant
from gateway.answer import Answer, Delta
from gateway.draft_length import DraftLengths
from gateway.jobs import Choice, Job
from gateway.metrics import GatewayMetrics, Outcome
from gateway.served import Backends
from gateway.settings import Settings
from gateway.speculate import speculate
from gateway.traces import trace_round
from tandem.errors import InternalError, TimedOut
from tandem.tracing import NoTracing, Tracing

_Result = TypeVar("_Result")


class Generation:
    """Runs jobs."""

    def __init__(
        self,
        *,
        settings: Settings,
        backends: Backends,
        metrics: GatewayMetrics,
        admission: Admission,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._backends = backends
        self._metrics = metrics
        self._admission = admission
        self._tracing = tracing or NoTracing()
        self._lengths = DraftLengths(most=settings.max_num_draft_tokens)

    async def run(self, job: Job) -> AsyncGenerator[tuple[int, Delta]]:
        """What the answers grow by, each delta with its answer's number. Raises TandemError.

        Close it (`aclosing`) to stop: sessions and places are given back before `aclose` returns.
        """
        began = time.perf_counter()
        grant = await self._in_time(self._admission.acquire([choice.size for choice in job.choices]), job)
        try:
            self._tracing.past("queue", seconds=time.perf_counter() - began, attributes={})
            if len(job.choices) == 1:
                async with aclosing(self._answer(job, job.choices[0], asyncio.Event(), grant.target_of(0))) as deltas:
                    async for delta in deltas:
                        yield 0, delta
            else:
                async with aclosing(self._merged(job, grant)) as merged:
                    async for index, delta in merged:
                        yield index, delta
            if (length := job.tally.acceptance_length) is not None:
                self._metrics.observe_acceptance_length(length)
        finally:
            self._admission.release(grant)

    async def _answer(
        self, job: Job, choice: Choice, prompt_ready: asyncio.Event, address: str | None
    ) -> AsyncGenerator[Delta]:
        """One answer, begun by the target at `address`, where there is one. The last delta comes when the sessions are
        closed already.

        A prompt's first answer sets `prompt_ready` with its first token, the others wait for it.
        """
        answer = Answer(choice.rules, job.served.tokenizer.detokenizer(skip_special_tokens=job.skip_special_tokens))
        outcome: Outcome = "cancelled"
        first_at = last_at = time.perf_counter()
        try:
            self._metrics.observe_verification(job.verification)
            if choice.sample == 0:
                self._metrics.observe_prompt(choice.start.prompt_length)
            else:
                await self._in_time(prompt_ready.wait(), job)
            rounds = speculate(
                choice.start,
                max_length=choice.start.prompt_length + choice.rules.max_tokens,
                plan=job.plan,
                length=self._lengths.start(job.plan, greedy=choice.start.sampling.greedy),
                target=self._backends.target_at(address),
                drafts=self._backends.drafts,
            )
            is_first = True
            async with aclosing(rounds):
                while True:
                    result = await self._in_time(anext(rounds), job)
                    last_at = time.perf_counter()
                    if is_first:
                        first_at = last_at
                        if choice.start.prompt_logprobs:
                            job.prompt_logprobs[choice.prompt] = result.prompt_logprobs
                        prompt_ready.set()
                        self._metrics.observe_first_token(first_at - job.arrived)
                    self._metrics.observe_round(result, is_first=is_first)
                    trace_round(self._tracing, result, prompt=choice.prompt, sample=choice.sample)
                    job.tally.add(result, is_first=is_first)
                    is_first = False
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

    async def _merged(self, job: Job, grant: Grant) -> AsyncGenerator[tuple[int, Delta]]:
        """All answers at once, their deltas as they come. The first to fail ends all."""
        queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(maxsize=len(job.choices))
        prompts_ready = [asyncio.Event() for choice in job.choices if choice.sample == 0]

        async def pump(index: int, choice: Choice) -> None:
            try:
                answer = self._answer(job, choice, prompts_ready[choice.prompt], grant.target_of(index))
                async with aclosing(answer) as deltas:
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
