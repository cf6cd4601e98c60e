"""From the name of a family to a fresh peer of it. One line each."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.child import ChildPeer
from benchmarks.peers.environments import python_of
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.peer import Model, Peer
from benchmarks.peers.tandem_up import TandemUp
from benchmarks.peers.vllm_server import VllmServer
from gateway.tokenizer import Tokenizer

OWN = "tandem"  # runs in the project's own environment


def make_peer(family: str, model: Model, tokenizer: Tokenizer) -> Peer:
    """A peer that is not started yet."""

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")

    match family:
        case "tandem":
            return TandemUp()
        case "llama_cpp":
            return LlamaServer(model)
        case "openvino" | "transformers":
            return ChildPeer([str(python_of(family)), "-m", f"benchmarks.peers.child_{family}"], model, decode)
        case "vllm":
            return VllmServer(model)
        case _:
            raise ValueError(f"no family {family!r}")
