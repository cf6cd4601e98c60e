"""Steps recorded as CUDA graphs: the one part of decoding that only a GPU can run."""

from __future__ import annotations

import torch

from tandem.engine.static_decode import Rows, Step

# Libraries choose kernels and take their workspaces at first use, which a graph cannot hold.
_WARM_UPS = 2


class CudaGraphs:
    """A Capture (see static_decode.py) for one device.

    All graphs share a memory pool: what one leaves behind, its logits too, may be overwritten by the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        """Run the step a few times, then record it. Raises RuntimeError where it does what a graph cannot hold."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of this process ask of CUDA meanwhile is none of the graph's business.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = step()

        def replay() -> Rows:
            with torch.cuda.device(self._device):
                graph.replay()
            return result

        return replay
