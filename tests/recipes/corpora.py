"""Documents in files of every kind, and a tokenizer for them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import zstandard

WORDS = ["shard", "unshard", "reshard", "gather", "reduce", "scatter", "rank", "mesh"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 3 to 20 words, no two alike."""
    draw = random.Random(seed)
    return [
        f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 20)))
        for number in range(count)
    ]


def write_jsonl(path: Path, documents: Sequence[str]) -> Path:
    """A document a line, as C4 has them; compressed as the suffix says."""
    lines = "".join(json.dumps({"text": each, "url": "x"}) + "\n" for each in documents)
    data = lines.encode()
    match path.suffix:
        case ".zst":
            data = zstandard.compress(data)
        case ".gz":
            data = gzip.compress(data)
    path.write_bytes(data)
    return path


def write_parquet(path: Path, documents: Sequence[str]) -> Path:
    """A document a row."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": list(documents)}), path, row_group_size=7)
    return path


def write_hub_folder(
    folder: Path, train: Sequence[str], validation: Sequence[str], files: int = 2
) -> Path:
    """A folder laid out as allenai/c4 is on the hub, with its configuration ``en``."""
    (folder / "en").mkdir(parents=True)
    each = len(train) // files
    for i in range(files):
        name = f"c4-train.{i:05}-of-{files:05}.json.gz"
        write_jsonl(folder / "en" / name, train[i * each : (i + 1) * each])
    write_jsonl(folder / "en" / "c4-validation.00000-of-00001.json.gz", validation)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n"
        "    path: en/c4-train.*.json.gz\n  - split: validation\n"
        "    path: en/c4-validation.*.json.gz\n---\n"
    )
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer with a token for each of our words, saved as ``transformers`` does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
    )
    saved.save_pretrained(folder)
    return folder
