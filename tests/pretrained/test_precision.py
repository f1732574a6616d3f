"""What ``transformers`` keeps in float32 computes in it, whatever the rest computes in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise._torch import fsdp
from shardwise.frontends.strategies import DATA, WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.rehearsal import program_of
from shardwise.insight.planning.settings import Settings
from shardwise.insight.schema.sharding import PrecisionName
from tests.worlds import on_processes

pytest.importorskip("transformers")

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = torch.arange(12)[None]


def _save(folder: Path) -> None:
    """Save an Ernie 4.5 with experts, whose router stays in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}
    config = AutoConfig.for_model("ernie4_5_moe", **sizes, **heads, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _used(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes in which the last layer computes, and that of the logits."""
    used: dict[str, torch.dtype] = {}
    inner: Any = next(each for each in model.modules() if type(each).__name__.endswith("MoeModel"))
    mlp = inner.layers[-1].mlp

    def note(gate: Any, _: object) -> None:
        used["gate"], used["experts"] = gate.weight.dtype, mlp.experts.down_proj.dtype

    mlp.gate.register_forward_pre_hook(note)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return used


@on_processes(2)
def test_routers_compute_in_float32(rank: int, world_size: int, tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    if rank == 0:
        _save(tmp_path)
    dist.barrier()
    kept = {"gate": FP32, "experts": BF16}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    assert _used(plain) == kept
    for options in (
        {"dtype": FP32, "param_dtype": BF16},
        {"dtype": BF16},
        {"dtype": BF16, "param_dtype": BF16},
        {"dtype": FP32, "param_dtype": BF16, "peft_config": LoraConfig(target_modules=["q_proj"])},
    ):
        model = shardwise.from_pretrained(tmp_path, **options)
        assert _used(model) == kept, options
        if "peft_config" not in options:
            found, expected = (each.eval()(input_ids=TOKENS).logits for each in (model, plain))
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.002)

    says: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: says.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    theirs = torch.distributed.fsdp.fully_shard
    model = shardwise.from_pretrained(tmp_path, dtype=FP32, param_dtype=BF16, shard=theirs)
    if fsdp.REDUCES_AS_STORED:
        assert _used(model) == kept
    else:
        assert "keeps parameters of" in says[0]

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    mesh = WantedMesh((DATA,), (world_size,))
    settings = Settings(mesh=mesh, shard_dtype=PrecisionName.BF16)
    program = program_of(Blueprint("model", model, list(model.model.layers)), settings)
    program.prepare()
    program.shard(init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names))
    assert _used(model) == kept, "shardwise train"
    assert model.model.layers[1].mlp.gate.weight.dtype == FP32
