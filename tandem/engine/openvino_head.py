"""An OpenVINO graph's head, cut down to some of the tokens."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from tandem.engine.runner import Int32Array

_ELEMENTWISE = {"Multiply": opset13.multiply, "Subtract": opset13.subtract}


def keep_tokens(graph: ov.Model, head: ov.Node, token_ids: Int32Array) -> None:
    """Let `head`, the multiplication that makes the logits, make those of `token_ids` [V] only, in their order."""
    weights = head.input_value(1)
    # [vocab, hidden] as PyTorch has them, or the other way round.
    axis = 0 if head.get_attributes()["transpose_b"] else 1
    rows = weights.partial_shape[axis].get_length()
    head.input(1).replace_source_output(_taken(weights, token_ids, rows=rows, axis=axis))
    graph.validate_nodes_and_infer_types()


def _taken(source: ov.Output, token_ids: Int32Array, *, rows: int, axis: int) -> ov.Output:
    """Some rows of weights, by the same steps from smaller constants: the plug-in knows weights of a few bits by them.

    Where there are other steps than known here, rows are gathered after them, which is right all the same.
    """
    node = source.get_node()
    kind = node.get_type_name()
    if axis == 0 and kind == "Constant" and node.get_element_type().bitwidth % 8 == 0:
        shape = list(node.get_output_shape(0))
        if not shape or shape[0] != rows:
            return source  # a number for all rows
        return opset13.constant(np.asarray(node.get_data())[token_ids]).output(0)
    if axis == 0 and kind in ("Convert", "Reshape", *_ELEMENTWISE):
        inputs = [port.get_source_output() for port in node.inputs()]
        first = _taken(inputs[0], token_ids, rows=rows, axis=axis)
        if kind == "Convert":
            return opset13.convert(first, node.get_element_type().to_string()).output(0)
        if kind == "Reshape":
            wanted = np.asarray(inputs[1].get_node().get_data()).copy()
            wanted[wanted == rows] = len(token_ids)
            return opset13.reshape(first, opset13.constant(wanted), special_zero=False).output(0)
        return _ELEMENTWISE[kind](first, _taken(inputs[1], token_ids, rows=rows, axis=axis)).output(0)
    return opset13.gather(source, opset13.constant(token_ids), opset13.constant(axis, np.int32)).output(0)
