"""One-segment graphs to batched ragged graphs. Eager runs the result, other backends compile or print it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from kvsieve.ops import Batch, NodeView, Value, kind_of
from kvsieve.segment import SegmentGraph, is_getitem, is_symbolic


@dataclass(frozen=True)
class Program:
    """A batched ragged graph.

    ``module(valid [N, W] bool, *inputs)`` returns the outputs, each ``[N, *shape]``; ``inputs`` are the named inputs
    in order, each ``[N, *shape]`` with the page axis padded to W. Padded positions of page-axis outputs are undefined.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lower(segment: SegmentGraph) -> Program:
    """Lower a checked one-segment graph to N segments with their own windows."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    root = torch.nn.Module()
    names = segment.reads or tuple(segment.trace.inputs)[:1]
    valid = fx.Proxy(graph.placeholder("valid"), tracer)
    proxies = {name: fx.Proxy(graph.placeholder(name), tracer) for name in names}
    batch = Batch(valid, next(iter(proxies.values())))
    for name, proxy in proxies.items():
        node = segment.trace.inputs[name]
        batch.env[node] = Value(proxy, segment.shape_of(node), True)
    for index, (node, tensor) in enumerate(segment.trace.constants.items()):
        root.register_buffer(f"constant_{index}", tensor.detach())
        proxy = fx.Proxy(graph.get_attr(f"constant_{index}"), tracer)
        batch.env[node] = Value(proxy, tuple(tensor.shape), False)
    for node in segment.nodes:
        if node.op == "call_function" and not is_symbolic(node):
            batch.env[node] = _lower_node(segment, node, batch)
    graph.output(tuple(batch.expanded(batch[node]).node for node in segment.outputs.values()))
    graph.eliminate_dead_code()
    graph.lint()
    return Program(fx.GraphModule(root, graph), names, tuple(segment.outputs))


def _lower_node(segment: SegmentGraph, node: fx.Node, batch: Batch) -> Value | tuple[Value, ...]:
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        parts = batch.env[source]
        assert isinstance(parts, tuple)
        return parts[index]
    kind = kind_of(node.target)
    assert kind is not None
    return kind.lower(NodeView(node, segment.shape_of), batch)
