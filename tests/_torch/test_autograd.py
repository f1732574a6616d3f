"""Private names of autograd do on this torch what ``_torch.autograd`` promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn

from shardwise._torch import autograd, dtensor
from shardwise._torch.c10d import fake_world


def test_a_hook_is_inside_a_backward_with_a_number() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[bool, int]] = []
    x.register_hook(lambda grad: seen.append((autograd.in_backward(), autograd.backward_id())))
    for _ in range(2):
        (x * 2).sum().backward()
    assert [inside for inside, _ in seen] == [True, True]
    assert seen[0][1] != seen[1][1], "each backward has its own number"
    assert not autograd.in_backward()
    assert autograd.backward_id() is None


def test_a_callback_runs_when_the_backward_is_over() -> None:
    x = torch.ones(2, requires_grad=True)
    order: list[str] = []
    y = x * 2

    def queue(grad: torch.Tensor) -> None:
        autograd.queue_after_backward(lambda: order.append(f"after, {x.grad is not None}"))
        order.append("hook")

    y.register_hook(queue)
    y.sum().backward()
    assert order == ["hook", "after, True"]


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


def test_hooks_of_a_parameter_are_found_and_run() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert autograd.grad_hooks(parameter) == []
    assert not autograd.has_post_accumulate_hooks(parameter)
    autograd.run_post_accumulate_hooks(parameter)  # none: nothing happens

    def double(grad: torch.Tensor) -> torch.Tensor:
        return grad * 2

    parameter.register_hook(double)
    called: list[torch.Tensor] = []
    handle = parameter.register_post_accumulate_grad_hook(called.append)
    assert autograd.grad_hooks(parameter) == [double]
    assert autograd.has_post_accumulate_hooks(parameter)
    autograd.run_post_accumulate_hooks(parameter)
    assert called == [parameter]
    handle.remove()
    assert not autograd.has_post_accumulate_hooks(parameter)


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


def test_a_version_grows_with_every_write_and_can_be_set() -> None:
    x = torch.ones(2)
    before = autograd.version_of(x)
    x.add_(1)
    assert autograd.version_of(x) == before + 1
    autograd.set_versions([x], [before])
    assert autograd.version_of(x) == before
    with torch.inference_mode():
        uncounted = torch.ones(2)
    assert autograd.version_of(uncounted) == -1


def test_a_look_changes_with_what_is_written_and_with_the_data() -> None:
    x = nn.Parameter(torch.ones(2))
    looks = [autograd.look_at([x])]
    with torch.no_grad():
        x.add_(1)
    looks.append(autograd.look_at([x]))
    x.data = torch.zeros(2)
    looks.append(autograd.look_at([x]))
    assert looks[0] != looks[1] != looks[2]


def test_a_version_counts_writes_to_the_local_tensor_too() -> None:
    with fake_world(2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        x = torch.distributed.tensor.zeros(4, device_mesh=mesh)
        before = autograd.version_with_local(x)
        dtensor.local_of(x).add_(1)
        assert autograd.version_with_local(x) == before + 1
    plain = torch.ones(2)
    assert autograd.version_with_local(plain) == autograd.version_of(plain)


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


def test_norms_and_products_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    norms = autograd.foreach_norm(tensors, 2.0)
    assert [norm.item() for norm in norms] == [5.0, 4.0]
    assert {norm.dtype for norm in norms} == {torch.float32}
    autograd.foreach_mul_(tensors[:1], torch.tensor(0.5))
    assert tensors[0].tolist() == [1.5, 2.0]


def test_a_function_is_called_directly_while_nothing_compiles() -> None:
    calls: list[int] = []

    @autograd.disable_compile
    def note(x: int) -> int:
        """Its own words."""
        calls.append(x)
        return x + 1

    assert note(1) == 2
    assert (note.__name__, note.__doc__) == ("note", "Its own words.")
    assert calls == [1]


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


def test_transforms_are_left_and_entered_again() -> None:
    inside: list[bool] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        with autograd.outside_transforms():
            inside.append(dtensor.storage_of(torch.ones(2)) is not None)
        return x * 2

    assert torch.func.vmap(body)(torch.ones(3)).tolist() == [2.0] * 3
    assert inside == [True]
    with autograd.outside_transforms():  # there are none: nothing happens
        pass


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


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_are_those_of_torch(order: float) -> None:
    tensor = torch.randn(7, generator=torch.Generator().manual_seed(0))
    [found] = autograd.foreach_norm([tensor], order)
    assert torch.allclose(found, torch.linalg.vector_norm(tensor, order))
