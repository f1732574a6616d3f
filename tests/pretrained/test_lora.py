"""Adapters on a sharded model train as on an unsharded one, and peft alone loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import checkpoint
from shardwise.base.errors import CheckpointError
from shardwise.pretrained.building import build
from shardwise.pretrained.lora import add_adapters
from shardwise.pretrained.merging import merge_lora
from tests.ecosystem.llama import full, loss_of, tiny_llama, tokens
from tests.harness import run_ranks
from tests.pretrained.test_merging import with_experts
from tests.worlds import Ranks

pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

SEED, STEPS = 5, 3

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "head, gaussian": {
        "target_modules": ["v_proj"],
        "modules_to_save": ["lm_head"],
        "init_lora_weights": "gaussian",
    },
    "embedding": {"target_modules": ["embed_tokens", "up_proj"]},
}


#: Adapters on parameters that are no layers: the experts of a model.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": "all-linear"},
    "gpt_oss": {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
}


def _config(kind: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **{**KINDS, **EXPERTS}[kind])


def _twin(folder: Path, kind: str) -> Any:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(SEED)
    return get_peft_model(base.train(), _config(kind))


def _sharded(folder: Path, kind: str, seed: int = SEED, **options: Any) -> Any:
    torch.manual_seed(seed)
    return shardwise.from_pretrained(folder, peft_config=_config(kind), **options)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        loss_of(model, tokens(2, step)[rank]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _train_twin(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        for batch in tokens(2, step):
            (loss_of(model, batch) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    values, wanted = dict(found.named_parameters()), dict(expected.named_parameters())
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        other = wanted[name].detach()
        off = (full(value) - other).abs().max()
        assert torch.equal(full(value), other), f"{name} is off by {off}"


def _trains(rank: int, world_size: int, folder: Path, kind: str) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    base = folder / "base"
    model, twin = _sharded(base, kind), _twin(base, kind)
    _assert_same_bits(model, twin)
    optimizer, its = _optimizer(model), _optimizer(twin)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    _train(model, optimizer, rank)
    _train_twin(twin, its)
    _assert_same_bits(model, twin)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    frozen = [param for param in model.parameters() if not param.requires_grad]
    assert frozen
    assert all(param.grad is None for param in frozen)
    assert len(optimizer.state) == sum(param.requires_grad for param in model.parameters())

    shardwise.save_pretrained(model, folder / "adapters")
    for loaded in (
        AutoPeftModelForCausalLM.from_pretrained(folder / "adapters"),
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "adapters"),
    ):
        _assert_same_bits(loaded, twin)
    if rank == 0:
        merge_lora(folder / "adapters", folder / "merged")
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
        expected = loaded.merge_and_unload().state_dict()
        assert all(torch.equal(merged[name], each) for name, each in expected.items())

    checkpoint.save(folder / "saved", model, optimizer, ignore_frozen_params=True)
    other = _sharded(base, kind, seed=SEED + 1)
    its_optimizer = _optimizer(other)
    checkpoint.load(folder / "saved", other, its_optimizer, ignore_frozen_params=True)
    _train(other, its_optimizer, rank, STEPS)
    _train_twin(twin, its, STEPS)
    _assert_same_bits(other, twin)


@pytest.mark.parametrize("kind", EXPERTS)
def test_adapters_on_experts_train_as_on_an_unsharded_model(
    threads: Ranks, tmp_path: Path, kind: str
) -> None:
    with_experts(kind, tmp_path / "base")
    threads(_trains, 2, tmp_path, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_on_an_unsharded_model(threads: Ranks, tmp_path: Path, kind: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    threads(_trains, 2, tmp_path, kind)


def _differs(rank: int, world_size: int, folder: Path) -> None:
    model = _sharded(folder / "base", "plain", seed=rank)
    mine = {name: full(param) for name, param in model.named_parameters()}
    told: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(told, mine)
    for name, value in mine.items():
        assert all(torch.equal(value, other[name]) for other in told), name
    zeros = [value for name, value in mine.items() if "lora_B" in name]
    assert zeros
    assert not any(value.any() for value in zeros)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(rank))
    assert torch.rand(1) == expected, "generators of ranks that differ go on where they were"


def _bf16(rank: int, world_size: int, folder: Path) -> None:
    """The base in bf16, adapters in fp32, both computing in bf16; a frozen group kept."""
    model = _sharded(
        folder / "base",
        "plain",
        dtype=torch.bfloat16,
        param_dtype=torch.bfloat16,
        reshard_after_forward=False,
    )
    dtypes = {param.requires_grad: param.dtype for param in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    optimizer = _optimizer(model)
    before = float(loss_of(model, tokens(2, 0)[rank]))
    for _ in range(8):
        loss_of(model, tokens(2, 0)[rank]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss_of(model, tokens(2, 0)[rank])) < before
    assert {param.dtype for param in optimizer.state} == {torch.float32}


def _copies(rank: int, world_size: int, folder: Path, module: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(target_modules=["v_proj"], modules_to_save=[module])
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    model = shardwise.from_pretrained(folder, peft_config=config)
    names = [name for name, _ in plain.named_parameters() if f".{module}." in name]
    assert any("modules_to_save" in name for name in names)
    for name in names:
        found, expected = model.get_parameter(name), plain.get_parameter(name)
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), expected), name


def test_a_copy_of_a_tied_weight_begins_with_its_values(tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path)
    run_ranks(_copies, 2, tmp_path, "lm_head")


def test_a_copy_of_a_converted_weight_and_its_original_are_both_read(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    run_ranks(_copies, 2, tmp_path, "experts")


def _refuses(rank: int, world_size: int, folder: Path) -> None:
    from peft import LoraConfig

    for settings in (
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [1]},
    ):
        config = LoraConfig(target_modules="all-linear", **settings)
        with pytest.raises(
            ValueError, match=r"others need the base in full|expected none: their forward"
        ):
            shardwise.from_pretrained(folder / "base", peft_config=config)
    model = _sharded(folder / "base", "plain")
    (folder / "taken").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="taken exists"):
        shardwise.save_pretrained(model, folder / "taken")


def test_dropout_on_single_parameters_is_refused_by_name(tmp_path: Path) -> None:
    from peft import LoraConfig

    config = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
    model = build(with_experts("mixtral", tmp_path))
    found = r"lora_dropout=0.1 in a model with model.layers.0.mlp.experts.gate_up_proj, expected 0"
    with pytest.raises(ValueError, match=found):
        add_adapters(model, config)


@pytest.mark.parametrize("program", [_differs, _bf16, _refuses])
def test_adapters_on_two_ranks(tmp_path: Path, program: Any) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    run_ranks(program, 2, tmp_path)
