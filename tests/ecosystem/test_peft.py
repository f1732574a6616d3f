"""LoRA by ``peft``: adapters train on a frozen base, which is sharded with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import checkpoint
from tests.ecosystem.llama import assert_equal, full, loss_of, tiny_llama, tokens, train
from tests.worlds import on_processes

pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

STEPS = 3


def _adapted(seed: int = 1) -> Any:
    from peft import LoraConfig, get_peft_model

    base = tiny_llama()
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def _sharded(seed: int = 1) -> Any:
    model = _adapted(seed)
    llama = model.base_model.model
    for module in (llama.model.embed_tokens, *llama.model.layers, llama.lm_head):
        shardwise.fully_shard(module)
    return shardwise.fully_shard(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _reduced(model: nn.Module, batch: Callable[[int], torch.Tensor]) -> Counter[int]:
    """How many elements of full gradients each reduce-scatter of a step takes."""
    sizes: Counter[int] = Counter()

    def count(output: torch.Tensor, full: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes[full.numel()] += 1
        return original(output, full, *args, **kwargs)

    name = next(
        name
        for name in ("reduce_scatter_single", "reduce_scatter_tensor")
        if hasattr(torch.distributed, name)
    )
    original = getattr(torch.distributed, name)
    setattr(torch.distributed, name, count)
    try:
        train(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, 1)
    finally:
        setattr(torch.distributed, name, original)
    return sizes


@on_processes(2, env={"SHARDWISE_TRANSPORT": "collectives"})
def test_adapters_train_on_a_frozen_base(rank: int, world_size: int, tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    def mine(step: int) -> torch.Tensor:
        return tokens(world_size, step)[rank]

    model, twin = _sharded(), _adapted()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    frozen = {n: full(p).clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer, its_optimizer = _optimizer(model), _optimizer(twin)
    train(model, optimizer, mine, STEPS)
    train(twin, its_optimizer, lambda step: tokens(world_size, step), STEPS)
    assert_equal(model, twin)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name
            assert torch.equal(full(param), frozen[name]), f"{name} is frozen"
        elif "lora_B" in name:
            assert full(param).abs().max() > 0, f"{name} has learned nothing"

    # Of a group with a frozen base and adapters, adapters are reduced; of a frozen group, nothing.
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = _reduced(model, mine)
    # With them goes a number for each and each rank: whether a rank has its gradient.
    numbers = world_size * sum(p.requires_grad for p in model.parameters())
    assert found == {(adapters + numbers) // 2: 2}, "one for each of two layers, of adapters alone"

    checkpoint.save(tmp_path / "lora", model, optimizer)
    other = _sharded(seed=2)
    its = _optimizer(other)
    checkpoint.load(tmp_path / "lora", other, its)
    train(other, its, mine, STEPS)
    train(twin, its_optimizer, lambda step: tokens(world_size, step), STEPS)
    assert_equal(other, twin)

    # What peft saves: adapters by its names. Full tensors, for a program without shards.
    adapter = {name: full(p) for name, p in get_peft_model_state_dict(other).items()}
    plain = _adapted(seed=3)
    set_peft_model_state_dict(plain, adapter)
    assert_equal(plain, twin)


def _methods() -> dict[str, Any]:
    """Methods that read a layer's weight apart from its forward, share tensors, or add tokens."""
    import peft

    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    layers = {**task, "target_modules": ["q_proj", "v_proj"]}
    return {
        "DoRA": peft.LoraConfig(r=2, use_dora=True, **layers),
        "modules to save": peft.LoraConfig(r=2, modules_to_save=["lm_head"], **layers),
        "trainable tokens": peft.LoraConfig(
            r=2, trainable_token_indices={"embed_tokens": [1, 5]}, **layers
        ),
        "a parameter": peft.LoraConfig(
            r=2, target_modules=[], target_parameters=["q_proj.weight"], **task
        ),
        "VeRA": peft.VeraConfig(r=4, **layers),
        "OFT": peft.OFTConfig(r=2, oft_block_size=0, **layers),
        "LoKr": peft.LoKrConfig(r=2, **layers),
        "IA3": peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[], **task),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3, **task),
    }


@on_processes(2)
def test_gradients_of_every_method_are_those_of_one_process(rank: int, world_size: int) -> None:
    from peft import get_peft_model

    for name, config in _methods().items():
        models = []
        for _ in range(2):
            base = tiny_llama(tied=name == "trainable tokens")
            torch.manual_seed(1)
            model: Any = get_peft_model(base, config)
            for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
                param.data.add_(0.05 * noise)  # adapters begin where some gradients are zero
            models.append(model)
        sharded, alone = models
        for layer in sharded.base_model.model.model.layers if name != "prefix" else ():
            shardwise.fully_shard(layer)
        shardwise.fully_shard(sharded)
        loss_of(sharded, tokens(world_size, 0)[rank]).backward()
        (sum(loss_of(alone, batch) for batch in tokens(world_size, 0)) / world_size).backward()
        for (param_name, param), twin in zip(
            sharded.named_parameters(), alone.parameters(), strict=True
        ):
            assert (param.grad is None) == (twin.grad is None), f"{name}: {param_name}"
            if param.grad is not None and twin.grad is not None:
                torch.testing.assert_close(
                    full(param.grad), twin.grad, rtol=1e-4, atol=1e-6, msg=f"{name}: {param_name}"
                )
