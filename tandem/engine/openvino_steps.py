"""A graph compiled for OpenVINO: once for steps of any number of tokens, and again for a few numbers that are usual.

Where a graph's shapes are open, OpenVINO works them out anew in every step, operation by operation: 1.4 ms of
SmolLM2-135M's 8.8 (two threads), and 5 ms more where a step has another number of tokens than the one before. Compiled
for one number of tokens, the same operations on the same numbers take none of that. How many sequences share the
tokens, how long they are, and whose logits are wanted, may stay open: that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import openvino as ov

from tandem.engine.continuations import StepSize, favourite_size

# What is compiled first where there is no memory for all: plain steps and drafts of one text, then of several.
_FIXED_SIZES: Final = (4, 9, 6, 16, 32, 24)
_BYTES_PER_WEIGHT_BYTE: Final = 1.1  # of a copy, by the file of the weights: 160 MB for 166 MB, more with groups
_INT64_INPUTS: Final = frozenset({"input_ids", "position_ids"})


class CompiledSteps:
    """Computes steps of any size with `compiled`, those of `fixed_sizes` faster, with what `compile_size` makes."""

    def __init__(
        self, compiled: ov.CompiledModel, compile_size: Callable[[int], ov.CompiledModel], fixed_sizes: Sequence[int]
    ) -> None:
        self._any = _Request(compiled)
        self._fixed = {size: _Request(compile_size(size)) for size in sorted(fixed_sizes)}
        self._size = StepSize()
        self._last = self._any

    @property
    def last_states(self) -> npt.NDArray[np.float32]:
        """The second output of the last step; memory that the next one may write anew."""
        return self._last.output(1)

    def keep(self, name: str, tensor: ov.Tensor) -> None:
        """Give an input a tensor for good: the KV cache, which all steps share."""
        for request in (self._any, *self._fixed.values()):
            request.keep(name, tensor)

    def fit(self, num_tokens: int) -> int:
        """How many tokens the next step of `num_tokens` has when it is filled up."""
        return self._fixed_size(num_tokens) or self._size.fit(num_tokens)

    def usual(self, num_tokens: int) -> int:
        """As `fit`, whatever the last step was."""
        return self._fixed_size(num_tokens) or favourite_size(num_tokens)

    def infer(self, inputs: Mapping[str, npt.NDArray[np.int32]], *, num_tokens: int) -> npt.NDArray[np.float32]:
        """The first output of a step of `num_tokens`; memory that the next one writes anew."""
        self._last = self._fixed.get(num_tokens, self._any)
        self._last.infer(inputs)
        return self._last.output(0)

    def _fixed_size(self, num_tokens: int) -> int | None:
        return next((size for size in self._fixed if size >= num_tokens), None)


class _Request:
    """One compiled graph's request, and the memory of its inputs."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self._request = compiled.create_infer_request()
        self._inputs: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]] = {}

    def keep(self, name: str, tensor: ov.Tensor) -> None:
        self._request.set_tensor(name, tensor)

    def infer(self, inputs: Mapping[str, npt.NDArray[np.int32]]) -> None:
        for name, array in inputs.items():
            self._give(name, array)
        self._request.infer()

    def output(self, index: int) -> npt.NDArray[np.float32]:
        output: npt.NDArray[np.float32] = self._request.get_output_tensor(index).data
        return output

    def _give(self, name: str, array: npt.NDArray[np.int32]) -> None:
        """Set an input; in the last step's memory where that has the shape, which saves 15 us for each."""
        known = self._inputs.get(name)
        if known is not None and known.shape == array.shape:
            known[...] = array
            return
        tensor = ov.Tensor(np.array(array, dtype=np.int64 if name in _INT64_INPUTS else np.int32))
        self._request.set_tensor(name, tensor)
        self._inputs[name] = tensor.data


def affordable_sizes(*, least_size: int, weights_bytes: int, most_bytes: int) -> tuple[int, ...]:
    """The sizes that are worth a copy of weights of so many bytes each, as many as `most_bytes` are enough for."""
    count = int(most_bytes / (_BYTES_PER_WEIGHT_BYTE * max(1, weights_bytes)))
    return (least_size, *_FIXED_SIZES)[:count]


def of_size(graph: ov.Model, num_tokens: int) -> ov.Model:
    """The same graph for steps of exactly so many tokens."""
    fixed: ov.Model = graph.clone()
    fixed.reshape({port: [num_tokens] for port in fixed.inputs if _INT64_INPUTS & set(port.names)})
    return fixed
