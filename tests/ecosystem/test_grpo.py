"""TRL's ``GRPOTrainer`` on a sharded model, while another process generates with its weights."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.app.recipes.text.data import SEPARATOR, byte_tokenizer
from tests.pretrained.small import save_llama
from tests.waiting import wait_until
from tests.weights.names import keep_names_in
from tests.worlds import Ranks

pytest.importorskip("trl", reason="needs trl: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

STEPS, PROMPTS, GENERATIONS, LENGTH = 12, 2, 8, 6
#: Completions are rewarded for tokens below this one, a quarter of all.
BELOW = SEPARATOR // 4


def _generate(folder: Path, address: str, ranks: int) -> None:
    """Generate what ranks ask for, each time with the version that they have published."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    weights = shardwise.subscribe("policy")
    with Listener(address) as listener:
        connections = [listener.accept() for _ in range(ranks)]
        with contextlib.suppress(EOFError):
            while True:
                for connection in connections:
                    version, prompts = connection.recv()
                    if weights.version < version:
                        weights.wait()
                        model.load_state_dict(dict(weights), strict=False)
                    assert weights.version == version
                    connection.send([_completed(model, prompt) for prompt in prompts])


@torch.no_grad()
def _completed(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """A completion, and the logarithms of the probabilities of its tokens."""
    tokens, logprobs = list(prompt), []
    for _ in range(LENGTH):
        likely = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(likely.exp(), 1))
        tokens.append(token)
        logprobs.append(float(likely[token]))
    return tokens[len(prompt) :], logprobs


def _share_of_low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token < BELOW for token in each) / LENGTH for each in completion_ids]


def _train(rank: int, world_size: int, folder: Path, address: str) -> list[float]:
    """Train; return the reward of every step."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    keep_names_in(folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    model = shardwise.from_pretrained(folder / "model").train()
    weights = shardwise.publish(model, "policy")
    generator = Client(address)
    versions = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        versions.append(weights.update())
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        generator.send((weights.version, ids))
        completions, logprobs = zip(*generator.recv(), strict=True)
        return {"prompt_ids": ids, "completion_ids": [*completions], "logprobs": [*logprobs]}

    with contextlib.redirect_stdout(None):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_share_of_low_tokens,
            rollout_func=rollout,
            processing_class=byte_tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": text} for text in ("a", "bc") * 32]),
            args=GRPOConfig(
                output_dir=str(folder / "grpo"),
                use_cpu=True,
                bf16=False,
                max_steps=STEPS,
                per_device_train_batch_size=PROMPTS * GENERATIONS // world_size,
                num_generations=GENERATIONS,
                max_completion_length=LENGTH,
                learning_rate=3e-2,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                gradient_checkpointing=False,
            ),
        )
        trainer.train()
    assert versions == list(range(2, STEPS + 2))
    return [each["reward"] for each in trainer.state.log_history if "reward" in each]


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a process that generates for two ranks."""
    save_llama(tmp_path / "model", vocab_size=SEPARATOR + 1, use_cache=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    address = str(tmp_path / "generator")
    process = multiprocessing.get_context("spawn").Process(
        target=_generate, args=(tmp_path, address, 2)
    )
    process.start()
    try:
        wait_until(lambda: Path(address).exists() or not process.is_alive(), 300.0)
        assert process.is_alive()
        yield address
    finally:
        process.kill()
        process.join()


def test_a_process_generates_with_the_weights_of_every_step(
    ranks: Ranks, tmp_path: Path, generator: str
) -> None:
    first, second = ranks(_train, 2, tmp_path, generator)
    assert first == second
    assert len(first) == STEPS
    assert sum(first[-3:]) > sum(first[:3]) + 0.3  # it learns what is rewarded
