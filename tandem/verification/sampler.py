"""Asks a gateway for completions, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from tandem.errors import InvalidRequest, TandemError, Unavailable
from tandem.verification.plan import Request

# The drafters that Tandem's draft service may have; which of them is there, the gateway says when asked for it.
KNOWN_DRAFTERS = ("model", "layer_skip", "ngram")

_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
_MAX_ATTEMPTS = 20  # of a request that a busy gateway sends away
_LONGEST_WAIT_SECONDS = 10.0
# A proxy does not know this machine.
_NO_PROXY: Mapping[str, None] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, and what speculation did for it."""

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Opening:
    """The ids of a prompt that was sent as text, and the answers that followed."""

    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]


class Sampler:
    """Speaks to the gateway at `url`; a context. Every method raises TandemError where the gateway does not answer."""

    def __init__(
        self, url: str, *, api_key: str | None, concurrency: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._concurrency = concurrency
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=concurrency),
            transport=transport,
            mounts=_NO_PROXY,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def has_drafter(self, name: str, *, request: Request) -> bool:
        """Whether the gateway takes `request` with this drafter. Raises InvalidRequest where it minds something else.

        While no draft service is up it takes any name.
        """
        body = request.body()
        response = await self._post({**body, "speculation": {**body["speculation"], "enabled": True, "drafter": name}})
        if response.status_code == 400 and _error(response).get("param") == "speculation.drafter":
            return False
        self._check(response)
        return True

    async def pilot(self, requests: Iterable[Request], *, done: Callable[[], None]) -> Opening:
        """The answers to requests that share one textual prompt, and its ids."""
        documents = await self._all(requests, done)
        prompt_ids = tuple(documents[0]["choices"][0]["prompt_token_ids"])
        return Opening(prompt_ids, tuple(map(_sample, documents)))

    async def samples(self, requests: Iterable[Request], *, done: Callable[[], None]) -> list[Sample]:
        """The answers in the requests' order. An iterable may end early: the next request is taken when one is done."""
        return [_sample(document) for document in await self._all(requests, done)]

    async def _all(self, requests: Iterable[Request], done: Callable[[], None]) -> list[dict[str, Any]]:
        waiting = enumerate(requests)
        documents: dict[int, dict[str, Any]] = {}

        async def work() -> None:
            for index, request in waiting:
                response = await self._post(request.body())
                self._check(response)
                documents[index] = response.json()
                done()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(work())
        except* TandemError as errors:
            raise _first(errors) from None
        return [documents[index] for index in range(len(documents))]

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        for _ in range(_MAX_ATTEMPTS):
            try:
                response = await self._http.post("/v1/completions", json=body)
            except httpx.TransportError as error:
                raise Unavailable(f"{self._http.base_url} does not answer: {error!r}") from error
            if response.status_code != 429:
                break
            wait = response.headers.get("retry-after", "1")
            await asyncio.sleep(min(_LONGEST_WAIT_SECONDS, float(wait) if wait.isdecimal() else 1.0))
        return response

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        message = str(_error(response).get("message") or response.text[:200] or response.reason_phrase)
        if response.status_code == 401:
            message += "; give a key with --api-key or TANDEM_API_KEY"
        kind = InvalidRequest if response.status_code in (400, 404, 422) else Unavailable
        raise kind(f"{self._http.base_url} answers {response.status_code}: {message}")


def _sample(document: Mapping[str, Any]) -> Sample:
    try:
        token_ids, speculation = document["choices"][0]["token_ids"], document["speculation"]
        return Sample(tuple(token_ids), speculation["drafted"], speculation["accepted"])
    except (KeyError, IndexError, TypeError) as error:
        raise Unavailable("the gateway's answer has no token ids or no report of the speculation") from error


def _error(response: httpx.Response) -> dict[str, Any]:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _first(errors: BaseExceptionGroup[TandemError]) -> TandemError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TandemError)
    return error
