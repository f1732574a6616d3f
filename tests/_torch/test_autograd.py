"""Private names of autograd do on this torch what ``_torch.autograd`` promises."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from shardwise._torch import autograd
from shardwise._torch.c10d import fake_world


def test_a_backward_knows_the_nodes_that_it_runs() -> None:
    x, z = (torch.ones(2, requires_grad=True) for _ in range(2))
    used, unused = x * 2, z * 3
    nodes = [node.grad_fn for node in (used, unused)]
    seen: list[bool] = []
    used.register_hook(
        lambda grad: seen.extend(
            autograd.runs_in_this_backward(node) for node in nodes if node is not None
        )
    )
    (used.sum() + unused.sum()).backward(inputs=[x])
    assert seen == [True, False]


def test_a_wait_is_a_node_of_the_graph() -> None:
    with fake_world(2):
        x = torch.ones(3, requires_grad=True)
        running = funcol.all_reduce(x * 2, "sum", torch.distributed.group.WORLD)
        if not running.requires_grad:
            running.requires_grad_()
        waited = autograd.wait_in_graph(running)
        assert type(waited) is torch.Tensor
        assert waited.requires_grad
        assert autograd.wait_in_graph(x) is x


def test_the_first_hook_comes_before_those_of_users_and_stays_when_they_go() -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    order: list[str] = []
    autograd.set_first_grad_hook(parameter, lambda grad: order.append("first"))
    assert autograd.grad_hooks(parameter) == []
    parameter.requires_grad_()
    handle = parameter.register_hook(lambda grad: order.append("user's"))

    def swap() -> None:  # as to() does with parameters of tensor subclasses
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2)))

    for changes in (
        lambda: None,
        lambda: autograd.set_first_grad_hook(parameter, lambda grad: order.append("new")),
        lambda: (swap(), autograd.set_first_grad_hook(parameter, lambda g: order.append("last"))),
        handle.remove,
    ):
        changes()
        (parameter * 2).sum().backward()
    assert order == ["first", "user's", "new", "user's", "last", "user's", "last"]


def test_whether_a_backward_adds_to_the_gradient_of_a_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    found: list[bool] = []
    parameter.register_hook(lambda grad: found.append(autograd.accumulates(parameter)))
    loss = (parameter * 2).sum()
    loss.backward(retain_graph=True)
    loss.backward(inputs=[parameter], retain_graph=True)
    torch.autograd.grad(loss, [parameter])
    assert found == [True, True, False]


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_a_view_may_be_written_to_unless_a_function_returned_it() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    view = x[1:]
    assert autograd.writable_base(view) is x
    assert autograd.writable_base(x) is None
    returned: torch.Tensor = _Passed.apply(x)  # type: ignore[no-untyped-call]
    assert autograd.writable_base(returned) is None


def test_a_compiler_looks_neither_into_it_nor_into_what_it_calls() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def called_by_it(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @autograd.disable_compile
    def inside(x: torch.Tensor) -> torch.Tensor:
        return called_by_it(x).sin()

    def program(x: torch.Tensor) -> torch.Tensor:
        return inside(x + 1) * 2

    compiled = torch.compile(program, backend=backend)
    for _ in range(2):  # the second one finds what was compiled, or left alone
        assert torch.equal(compiled(torch.ones(2)), program(torch.ones(2)))
    assert len(graphs) == 2, "it runs between two graphs"
    assert not any("sin" in code for code in graphs)
    torch.compiler.reset()


def test_what_is_left_for_a_write_is_entered_again_although_the_context_is_kept() -> None:
    kept = autograd.no_grad()
    inside: list[bool] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        with kept:
            inside.append(autograd.in_transform())
        inside.append(autograd.in_transform())
        return x * 2

    torch.func.vmap(body)(torch.ones(3))
    assert inside == [False, True]
