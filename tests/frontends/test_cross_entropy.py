"""The loss of a head in chunks equals that of whole logits, and never has them."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise import checkpoint_module, fully_shard, linear_cross_entropy
from shardwise.frontends.blocks import keep_every_second_product, keep_products
from shardwise.frontends.cross_entropy import WholeLogitsError

WIDTH, ROWS, TOKENS = 16, 301, 700  # three chunks


def _whole(head: nn.Module, hidden: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


def _data(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, tokens // 2, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(ROWS, (2, tokens // 2), generator=generator)
    return hidden, targets.masked_fill(targets % 5 == 0, -100)


def _head(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, ROWS, bias=bias)


def _results(loss: Any, head: nn.Module, hidden: Tensor, *args: Any) -> list[Tensor | None]:
    """The loss, and the gradients of a scaled one, as fp16 is trained."""
    head.zero_grad()
    hidden = hidden.clone().requires_grad_()
    value = loss(head, hidden, *args)
    (64 * value).backward()
    return [value.detach(), hidden.grad, *(param.grad for param in head.parameters())]


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0), (torch.float16, 0)],
)
def test_loss_and_gradients_are_no_worse_than_of_whole_logits(
    dtype: torch.dtype, rounding: float, reduction: Any
) -> None:
    for bias, tokens in product((True, False), (2, 512, TOKENS)):
        head = _head(bias=bias).to(dtype)
        data = _data(dtype, tokens)
        exact = _results(_whole, copy.deepcopy(head).double(), data[0].double(), data[1], reduction)
        whole = _results(_whole, head, *data, reduction)
        chunks = _results(
            lambda *args: linear_cross_entropy(*args[:3], reduction=args[3]), head, *data, reduction
        )
        for found, other, wanted in zip(chunks, whole, exact, strict=True):
            assert found is not None and other is not None and wanted is not None
            assert (found.dtype, found.shape) == (other.dtype, other.shape)
            assert _error(found, wanted) <= 1.5 * _error(other, wanted) + rounding


def test_only_what_is_trained_gets_gradients() -> None:
    hidden, targets = _data()
    for trained, wanted in product((True, False), repeat=2):
        head = _head().requires_grad_(trained)
        given = hidden.clone().requires_grad_(wanted)
        loss = linear_cross_entropy(head, given, targets)
        assert loss.requires_grad == (trained or wanted)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        assert (given.grad is not None, head.weight.grad is not None) == (wanted, trained)
    with torch.no_grad():
        assert not linear_cross_entropy(_head(), hidden, targets).requires_grad


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that operations return."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        found = [each.numel() for each in tree_leaves(out) if isinstance(each, Tensor)]
        self.numel = max(self.numel, *found, 0)
        return out


@pytest.mark.parametrize("trained", [True, False])
def test_logits_are_never_whole(trained: bool) -> None:
    hidden, targets = _data()
    head = _head().requires_grad_(trained)
    with _Largest() as largest:
        loss = linear_cross_entropy(head, hidden.requires_grad_(trained), targets)
        if trained:
            loss.backward()  # type: ignore[no-untyped-call]
    assert largest.numel <= 256 * ROWS < targets.numel() * ROWS


@pytest.mark.parametrize("targets", [torch.full((4,), -100), torch.zeros(0, dtype=torch.long)])
def test_without_targets_the_mean_is_nan_and_gradients_are_zero(targets: Tensor) -> None:
    hidden = torch.ones(len(targets), WIDTH)
    whole = _results(_whole, _head(), hidden[None], targets)
    chunks = _results(linear_cross_entropy, _head(), hidden[None], targets[None])
    assert chunks[0] is not None and chunks[0].isnan()
    torch.testing.assert_close(chunks, whole, equal_nan=True)


def test_backward_may_run_again() -> None:
    hidden, targets = _data()
    hidden.requires_grad_()
    loss = linear_cross_entropy(_head(), hidden, targets)
    once, again = (torch.autograd.grad(loss, hidden, retain_graph=keep) for keep in (True, False))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_of_the_head(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        whole = _results(_whole, _head(), *_data())
        chunks = _results(linear_cross_entropy, _head(), *_data())
    torch.testing.assert_close(chunks, whole, rtol=2e-2, atol=2e-3)


def test_wrong_targets_are_errors_of_torch() -> None:
    head, (hidden, targets) = _head(), _data(tokens=4)
    for wrong in (targets * 0 + ROWS, targets * 0 - 1, targets.int(), targets.float()):
        errors = []
        for loss in (_whole, linear_cross_entropy):
            with pytest.raises((IndexError, RuntimeError)) as error:
                loss(head, hidden, wrong)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]
    with pytest.raises(ValueError, match=r"targets: found shape \(2,\), expected \(2, 2\)"):
        linear_cross_entropy(head, hidden, targets[0])
    none: Any = "none"
    with pytest.raises(ValueError, match="reduction: found 'none', expected 'mean' or 'sum'"):
        linear_cross_entropy(head, hidden, targets, reduction=none)


class _Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = _head()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.module(x)


def test_a_head_that_is_no_plain_linear_layer_is_refused() -> None:
    for head in (_Scaled(WIDTH, ROWS), _Around(), nn.Sequential(_head())):
        with pytest.raises(
            WholeLogitsError, match=rf"head: found \S+{type(head).__name__}, expected"
        ):
            linear_cross_entropy(head, *_data())
    with pytest.raises(WholeLogitsError, match="Linear with a forward of its own"):
        linear_cross_entropy(checkpoint_module(_head()), *_data())


def test_the_head_is_as_before() -> None:
    """Its hooks have run, also if one of them has raised."""
    head, (hidden, targets) = _head(), _data()
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda *call: seen.append(call[2]))
    loss = linear_cross_entropy(head, hidden, targets)
    assert seen[0] is loss
    hook.remove()

    def fails(*_: object) -> None:
        raise KeyError

    hook = head.register_forward_hook(fails)
    with pytest.raises(KeyError):
        linear_cross_entropy(head, hidden, targets)
    hook.remove()
    assert head(hidden).shape == (*targets.shape, ROWS)
    assert copy.deepcopy(head)(hidden).equal(head(hidden))
    assert pickle.loads(pickle.dumps(head))(hidden).equal(head(hidden))


def test_a_compiled_model_runs_the_loss_between_graphs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH), _head()

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return linear_cross_entropy(self.head, self.first(x).relu(), targets)

    model = Model()
    expected = model(*_data())
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*_data()), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(*_data()), expected)


# -- heads that are cut over the vocabulary --------------------------------------------------------


def _cases() -> Iterator[tuple[int, Placement, bool, Any]]:
    """Rows that two ranks divide and others, what the head gets and returns, and who shards it."""
    shards = (None, fully_shard, fsdp.fully_shard)
    yield from product((31, 32), (Replicate(), Shard(1)), (True, False), shards)


def _check_cut_heads(rank: int, world_size: int) -> None:
    # Torch's FSDP2 warns of what tensor parallelism returns, be it logits or a loss: a view.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh["dp"].get_local_rank(), mesh["tp"]
    for rows, gets, local, shard in _cases():
        torch.manual_seed(0)
        head = nn.Linear(8, rows, bias=rows == 31)
        whole = copy.deepcopy(head)
        hidden, targets = torch.randn(2, 2, 6, 8), torch.randint(rows, (2, 2, 6))
        targets[:, 0, 0] = -100
        leaf = hidden.clone().requires_grad_()
        losses = [_whole(whole, each, goal) for each, goal in zip(leaf, targets, strict=True)]
        (losses[data] if shard is None else sum(losses) / 2).backward()  # type: ignore[union-attr]
        layout = ColwiseParallel(
            input_layouts=gets, output_layouts=Shard(-1), use_local_output=local
        )
        parallelize_module(head, tensor, layout)
        if shard is not None:
            shard(head, mesh=mesh["dp"])
        part = [slice(None)] * 2
        if gets.is_shard():
            part[1] = slice(3 * tensor.get_local_rank(), 3 * tensor.get_local_rank() + 3)
        given = hidden[data][tuple(part)].clone().requires_grad_()
        loss = linear_cross_entropy(head, given, targets[data])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(loss, losses[data].detach(), check_stride=False)
        for own, other in zip(head.parameters(), whole.parameters(), strict=True):
            assert isinstance(own.grad, DTensor)
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)
        assert leaf.grad is not None
        times = 1 if shard is None else 2
        torch.testing.assert_close(given.grad, times * leaf.grad[data][tuple(part)])
    head = parallelize_module(nn.Linear(8, 32), tensor, ColwiseParallel())
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(head, torch.ones(2, 8), torch.tensor([1, 32]))
    gathered = ColwiseParallel(output_layouts=Replicate())
    head = parallelize_module(nn.Linear(8, 32), tensor, gathered)
    with pytest.raises(WholeLogitsError, match="output_layouts"):
        linear_cross_entropy(head, torch.ones(2, 8), torch.tensor([1, 2]))


def test_heads_that_are_cut_over_the_vocabulary(ranks: Any) -> None:
    ranks(_check_cut_heads, 4)


# -- programs around it ----------------------------------------------------------------------------


def test_autocast_leaves_float64_as_it_is() -> None:
    head, (hidden, targets) = _head().double(), _data(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (loss(head, hidden, targets) for loss in (linear_cross_entropy, _whole))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted)


def _scaled(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
    return logits * 2


def _scaled_in_place(module: nn.Module, args: Any, logits: Tensor) -> None:
    with torch.no_grad():
        logits.mul_(2)


class _Scaling(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


def test_hooks_may_look_at_the_loss_but_not_change_it() -> None:
    hidden, targets = _data()
    head = _head()
    head.register_forward_hook(lambda module, args, logits: None)
    head.register_full_backward_hook(lambda module, into, out: None)
    linear_cross_entropy(head, hidden.requires_grad_(), targets).backward()
    scaling = _Scaling(WIDTH, ROWS)
    for hook in (_scaled, _scaled_in_place):
        head = _head()
        head.register_forward_hook(hook)
        for each in (head, scaling):
            with pytest.raises(WholeLogitsError, match="changes what it returns"):
                linear_cross_entropy(each, hidden, targets)


def test_gradients_cannot_be_differentiated_even_silently() -> None:
    head, (hidden, targets) = _head(), _data()
    hidden.requires_grad_()
    loss = linear_cross_entropy(head, hidden, targets)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    penalty = loss + grad.square().sum()
    with pytest.raises(RuntimeError, match="twice"):
        penalty.backward()


def test_gradients_may_be_batched() -> None:
    head, (hidden, targets) = _head(), _data()
    hidden.requires_grad_()
    factors = torch.tensor([1.0, -2.0])
    found, wanted = (
        torch.autograd.grad(loss(head, hidden, targets), hidden, factors, is_grads_batched=True)[0]
        for loss in (linear_cross_entropy, _whole)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("context_fn", [keep_products, keep_every_second_product])
def test_selective_checkpoints_keep_no_logits(context_fn: Any) -> None:
    """What they keep is as large as hidden states and weight, which logits of three chunks pass."""

    def run(loss: Any, head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
        def part(hidden: Tensor) -> Tensor:
            return loss(head, (hidden @ torch.eye(WIDTH)).sin(), targets)

        found: Tensor = checkpoint(part, hidden, use_reentrant=False, context_fn=context_fn)
        return found

    data = _data()
    found, wanted = (
        _results(lambda *args, loss=loss: run(loss, *args), _head(), *data)
        for loss in (linear_cross_entropy, _whole)
    )
    torch.testing.assert_close(found, wanted)


def test_other_threads_and_copies_of_a_head_that_computes_a_loss_get_logits() -> None:
    head, (hidden, targets) = _head(), _data()
    main, found = threading.get_ident(), []

    def other() -> None:
        copied = copy.deepcopy(head)
        found.extend([head(hidden), copied(hidden)])
        found.extend(linear_cross_entropy(each, hidden, targets) for each in (head, copied))

    def meanwhile(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == main and not found:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    handle = head.register_forward_pre_hook(meanwhile)
    loss = linear_cross_entropy(head, hidden, targets)
    handle.remove()
    assert "forward" not in head.__dict__
    torch.testing.assert_close(found, [head(hidden)] * 2 + [loss] * 2)
