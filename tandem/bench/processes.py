"""CPU time and memory of the processes that serve, out of their /metrics pages; and what these say of the builds.

Every process is asked before and after each group of requests, so that what an arm used is what was added in between.
A page without `process_cpu_seconds_total` is no error: the figure is then missing, and said to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.client import NO_PROXY
from tandem.errors import InvalidRequest, Unavailable

_CPU: Final = "process_cpu_seconds_total"
_MEMORY: Final = "process_resident_memory_bytes"
_MAX_PROCESSES: Final = 32


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """Since its start, and now. None: the process does not say."""

    cpu_seconds: float | None
    resident_bytes: float | None


class Processes:
    """The pages in `urls`, by the processes' names; a context. `api_keys`: for those that ask for one, by name."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        api_keys: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._urls = urls
        self._headers = {name: {"authorization": f"Bearer {key}"} for name, key in (api_keys or {}).items()}
        self._http = httpx.AsyncClient(timeout=5.0, transport=transport, mounts=NO_PROXY)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def builds(self, *, required: Collection[str]) -> dict[str, dict[str, str]]:
        """The labels of each process's info metrics (`..._info`): versions and the like.

        Raises Unavailable where one that is required does not answer.
        """
        pages = await asyncio.gather(*map(self._page, self._urls))
        for (name, url), page in zip(self._urls.items(), pages, strict=True):
            if page is None and name in required:
                raise Unavailable(f"no metrics of {name} at {url}: correct or leave out its --metrics-url")
        return {name: read_builds(page or "") for name, page in zip(self._urls, pages, strict=True)}

    async def figures(self) -> dict[str, ProcessFigures]:
        """Of every process, now."""
        pages = await asyncio.gather(*map(self._page, self._urls))
        return {name: read_figures(page or "") for name, page in zip(self._urls, pages, strict=True)}

    async def _page(self, name: str) -> str | None:
        try:
            response = await self._http.get(self._urls[name], headers=self._headers.get(name))
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None


def used(before: Mapping[str, ProcessFigures], after: Mapping[str, ProcessFigures]) -> dict[str, float]:
    """CPU seconds in between, of the processes that tell. One that was started anew in between does not count."""
    seconds: dict[str, float] = {}
    for name, figures in after.items():
        earlier = before[name].cpu_seconds
        if figures.cpu_seconds is not None and earlier is not None and figures.cpu_seconds >= earlier:
            seconds[name] = figures.cpu_seconds - earlier
    return seconds


def read_figures(page: str) -> ProcessFigures:
    """Two samples of a page. By hand: the pages are long, and the parser's time would be taken from the services."""
    found: dict[str, float] = {}
    for line in page.split("\n"):
        name, _, value = line.partition(" ")
        if name in (_CPU, _MEMORY):
            found[name] = float(value.split()[0])
    return ProcessFigures(found.get(_CPU), found.get(_MEMORY))


def read_builds(page: str) -> dict[str, str]:
    """The labels of all info metrics of a page, together."""
    labels: dict[str, str] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_info"):
                labels |= sample.labels
    return labels


def parse_metrics_urls(words: Sequence[str]) -> dict[str, str]:
    """`NAME=URL` each, as in target=http://127.0.0.1:9101. Raises InvalidRequest."""
    urls: dict[str, str] = {}
    for word in words:
        name, _, url = word.partition("=")
        if not name.isidentifier() or name in urls or not url.startswith(("http://", "https://")):
            raise InvalidRequest(
                f"--metrics-url {word[:100]!r}: write NAME=URL, each name once, as in target=http://127.0.0.1:9101",
                param="metrics_url",
            )
        urls[name] = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    if len(urls) > _MAX_PROCESSES:
        raise InvalidRequest(f"at most {_MAX_PROCESSES} --metrics-url, got {len(urls)}", param="metrics_url")
    return urls
