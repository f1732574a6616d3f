"""A small model with weights, its tokenizer, and chats about little: what people fine-tune."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["shard", "gather", "reduce", "scatter", "rank", "mesh", "add", "is", "1", "2", "3", "4"]

#: Writes each message between tokens of its own, and marks nothing.
PLAIN = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
#: The same, and marks what the assistant says.
MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
#: Leaves out the reasoning of all answers but the last, as Qwen3 does.
FORGETTING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on our words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    if template is not None:
        made.chat_template = template
    return made


def make_model(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    """A Llama of odd sizes, with weights that differ from a fresh one's."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 24,
        "intermediate_size": 42,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 2,
        **changes,
    }
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**settings))


def pretrain(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int) -> None:
    """Train a model a little, on the plain text of our words."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def publish(folder: Path, template: str | None = PLAIN, **changes: Any) -> Path:
    """Pretrain a model, and save it with its tokenizer."""
    tokenizer = make_tokenizer(template)
    model = make_model(len(tokenizer), **changes)
    text = " ".join(random.Random(1).choices(WORDS, k=400))
    tokens = torch.tensor(tokenizer(text)["input_ids"][:256]).reshape(4, 64)
    pretrain(model, tokens, steps=5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of one to three turns, and completions; no two alike."""
    draw = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    made: list[dict[str, Any]] = []
    for number in range(count):
        if number % 5 == 4:
            made.append({"prompt": f"{number} {words(2, 6)}", "completion": f" {words(2, 8)}"})
            continue
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": f"{number} {words(2, 5)}?"})
            messages.append({"role": "assistant", "content": words(1, 6)})
        made.append({"messages": messages})
    return made


def write_lines(path: Path, values: Sequence[Any]) -> Path:
    """One JSON value per line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
