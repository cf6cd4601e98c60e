"""What lies between us and a client: bytes that come one at a time, and a terminal."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

PROMPT = "한국어 🙂 漢字 é " * 3


@asynccontextmanager
async def _slicer(url: str) -> AsyncIterator[str]:
    """A TCP proxy that forwards the server's bytes one by one."""
    host, port = url.removeprefix("http://").split(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(host, int(port))

        async def forward() -> None:
            while data := await reader.read(65536):
                to_server.write(data)
            to_server.close()

        requests = asyncio.create_task(forward())
        try:
            while data := await from_server.read(65536):
                for value in data:
                    writer.write(bytes([value]))
                    await writer.drain()
                    await asyncio.sleep(0)  # so that each byte is a write of its own
        finally:
            requests.cancel()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a4_a_stream_cut_into_single_bytes_loses_no_character(url: str) -> None:
    async def say(base: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
            chunks = await client.completions.create(
                model="tandem",
                prompt=PROMPT,
                max_tokens=60,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])

    straight = await say(url)
    async with _slicer(url) as sliced:
        assert await say(sliced) == straight
    assert any(ord(character) > 127 for character in straight)


def test_curl_shows_a_stream_as_it_comes_and_a_readable_error(url: str) -> None:
    def curl(body: str) -> str:
        command = ["curl", "-sN", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    events = curl('{"prompt": "fox", "max_tokens": 10, "stream": true}').split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    assert '"message":"temperature: ' in curl('{"prompt": "fox", "temperature": 9}')
