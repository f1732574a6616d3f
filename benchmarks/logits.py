"""The peak and the speed of ``shardwise train lm`` with whole logits, and with logits in chunks.

    python benchmarks/logits.py [--vocabulary 64000] [--tokens 4096] [--rounds 5]

In every round, both train the same Llama (hidden 512, 4 layers) on the same tokens of two ranks for
two steps. The peak is the resident memory of a rank, less that of a tiny model; the speed is that
of the last step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast

STEPS, LENGTH = 2, 256


def _write_model(folder: Path, vocabulary: int) -> None:
    """Write a configuration, a tokenizer of words that are numbers, and a text of them."""
    words = {str(number): number for number in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "words.json"))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_file=str(folder / "words.json"), eos_token="1").save_pretrained(
        folder / "tokenizer"
    )
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
    )
    (folder / "config.json").write_text(config.to_json_string())
    draw = random.Random(0)
    lines = (" ".join(str(draw.randrange(vocabulary)) for _ in range(200)) for _ in range(2000))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def _train(folder: Path, tokens: int, **options: object) -> dict[str, float]:
    """Return the last metrics of a training."""
    options |= {"nproc": 2, "seq_length": LENGTH, "batch_size": tokens // LENGTH, "steps": STEPS}
    options |= {"data": folder / "text.jsonl", "sample_tokens": 0, "out": folder / "run"}
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    command = [sys.executable, "-m", "shardwise", "train", "lm", "--overwrite"]
    asked = [part for pair in given for part in pair]
    subprocess.run([*command, *asked], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, float]] = [json.loads(line) for line in lines if "tokens_per_s" in line]
    return steps[-1]


def main() -> int:
    """Measure in turns, and print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=64_000)
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank and step")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"whole": [], "chunks": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(folder, options.vocabulary)
        model = {"model": folder / "config.json", "tokenizer": folder / "tokenizer"}
        base = _train(folder, LENGTH, model="llama-tiny")["memory_mib"]
        for _ in range(options.rounds):
            for logits, rounds in found.items():
                rounds.append(_train(folder, options.tokens, logits=logits, **model))
                rounds[-1]["MiB"] = rounds[-1]["memory_mib"] - base
                print(logits, {name: round(value, 3) for name, value in rounds[-1].items()})
    print(f"{base:,.0f} MiB: the peak of a tiny model, which is left out below")
    for unit in ("MiB", "tokens_per_s", "loss"):
        whole, chunks = (statistics.median(each[unit] for each in found[k]) for k in found)
        print(f"{unit:12} whole {whole:9,.5g}  chunks {chunks:9,.5g}  ratio {chunks / whole:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
