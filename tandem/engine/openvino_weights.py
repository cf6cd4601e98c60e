"""The weights of an OpenVINO graph's multiplications: which they are, and others made of them.

Weights of a few bits are a constant and some steps that restore its numbers (convert, subtract the zero point, multiply
by the scale, reshape). The plug-in knows them by these steps, so other weights are made by the same steps from other
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from tandem.engine.runner import Int32Array

_ELEMENTWISE: Final = {"Multiply": opset13.multiply, "Subtract": opset13.subtract}
_STEPS: Final = frozenset({"Convert", "Reshape", *_ELEMENTWISE})

_AnyArray = npt.NDArray[np.generic]
_Combine = Callable[[Sequence[_AnyArray]], _AnyArray]


def weight_constants(multiplication: ov.Node) -> Iterator[ov.Node]:
    """The constants that its right side is restored from; none where that is no weight."""
    nodes = [multiplication.input_value(1).get_node()]
    while nodes:
        node = nodes.pop()
        if node.get_type_name() == "Constant":
            yield node
        elif node.get_type_name() in _STEPS:
            nodes += [port.get_source_output().get_node() for port in node.inputs()]


def keep_tokens(graph: ov.Model, head: ov.Node, token_ids: Int32Array) -> None:
    """Let `head`, the multiplication that makes the logits, make those of `token_ids` [V] only, in their order."""
    weights = head.input_value(1)
    taken = None
    if head.get_attributes()["transpose_b"]:
        taken = _combined([weights], lambda arrays: arrays[0][token_ids], num_rows=len(token_ids))
    if taken is None:  # steps unknown here, or columns: right all the same
        axis = 0 if head.get_attributes()["transpose_b"] else 1
        taken = opset13.gather(weights, opset13.constant(token_ids), opset13.constant(axis, np.int32)).output(0)
    head.input(1).replace_source_output(taken)
    graph.validate_nodes_and_infer_types()


def join_multiplications(graph: ov.Model) -> None:
    """Let one multiplication do for those of the same numbers: queries, keys and values; a gated layer's two halves.

    Each by itself rounds the numbers to 8 bits anew, and waits for all threads at its end: that takes 0.4 ms of
    SmolLM2-135M's 6.4 for a token (two threads). Those whose weights are stored unlike stay apart.
    """
    readers: dict[tuple[str, int], list[ov.Node]] = {}
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul" and node.get_attributes() == {"transpose_a": False, "transpose_b": True}:
            source = node.input_value(0)
            readers.setdefault((source.get_node().get_name(), source.get_index()), []).append(node)
    for alike in readers.values():
        weights = [node.input_value(1) for node in alike]
        if len(alike) < 2 or any(
            len(source.partial_shape) != 2 or source.partial_shape.is_dynamic for source in weights
        ):
            continue
        rows = [source.shape[0] for source in weights]
        joined = _combined(weights, np.concatenate, num_rows=sum(rows))
        if joined is None:
            continue
        product = opset13.matmul(alike[0].input_value(0), joined, transpose_a=False, transpose_b=True)
        parts = opset13.variadic_split(
            product, opset13.constant(-1), opset13.constant(np.asarray(rows, dtype=np.int64))
        )
        for index, node in enumerate(alike):
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(parts.output(index))
    graph.validate_nodes_and_infer_types()


def _combined(sources: Sequence[ov.Output], combine: _Combine, *, num_rows: int) -> ov.Output | None:
    """Weights of `num_rows` rows, made by `combine` of those of `sources`; None where these are unlike or unknown."""
    return _Combined([source.shape[0] for source in sources], combine, num_rows).of(sources)


class _Combined:
    def __init__(self, rows: Sequence[int], combine: _Combine, num_rows: int) -> None:
        self._rows, self._combine, self._num_rows = rows, combine, num_rows

    def of(self, sources: Sequence[ov.Output]) -> ov.Output | None:
        nodes = [source.get_node() for source in sources]
        kinds = {(node.get_type_name(), node.get_element_type().to_string()) for node in nodes}
        if len(kinds) != 1:
            return None
        kind, element_type = kinds.pop()
        if kind == "Constant":
            return self._constant(nodes)
        if kind not in _STEPS:
            return None
        first = self.of([node.input_value(0) for node in nodes])
        if first is None:
            return None
        if kind == "Convert":
            return opset13.convert(first, element_type).output(0)
        if kind == "Reshape":
            shape = np.asarray(nodes[0].input_value(1).get_node().get_data()).copy()
            if shape[0] != -1:
                shape[0] = self._num_rows
            return opset13.reshape(first, opset13.constant(shape), special_zero=False).output(0)
        second = self.of([node.input_value(1) for node in nodes])
        return None if second is None else _ELEMENTWISE[kind](first, second).output(0)

    def _constant(self, nodes: Sequence[ov.Node]) -> ov.Output | None:
        if nodes[0].get_element_type().bitwidth % 8:  # several in a byte
            return None
        arrays = [np.asarray(node.get_data()) for node in nodes]
        if all(array.shape[:1] == (rows,) for array, rows in zip(arrays, self._rows, strict=True)):
            return opset13.constant(self._combine(arrays)).output(0)
        same = all(np.array_equal(array, arrays[0]) for array in arrays)  # a number for all rows
        return nodes[0].output(0) if same else None
