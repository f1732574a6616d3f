"""``shardwise generate``: the text that a language model continues, printed as it comes."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, TextStreamer

from shardwise import fully_shard
from shardwise.app.recipes.core.model import Sampling, end_tokens, generate_tokens
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.text.data import byte_tokenizer
from shardwise.app.recipes.text.request import Request
from shardwise.base import devices
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.say import say
from shardwise.base.units import listed, one_line, printable
from shardwise.checkpoint.disk.beside import folders_of
from shardwise.checkpoint.formats.detect import find_checkpoint, find_tokenizer, open_source
from shardwise.checkpoint.formats.source import Source
from shardwise.insight.planning.presets import longest_sequence
from shardwise.pretrained import opening
from shardwise.pretrained.building import build_from, find, find_adapters
from shardwise.pretrained.filling import fill
from shardwise.wrap import AUTO, apply_wrap


def generate(request: Request) -> None:
    """Generate text and print it as it comes: in this process, or as one rank of torchrun's world.

    Raises:
        UserError: there is no model or no tokenizer, or the prompt cannot be used.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device, kind = devices.CPU, devices.default_type()
    if kind != device.type:
        device = devices.take(kind, rank)
    if "RANK" in os.environ:
        dist.init_process_group(devices.backends_for(device))
    try:
        _generate(request, device)
    except (CheckpointError, ValueError, TypeError) as error:
        text = str(error)
        name = "" if text.startswith(request.source) else f"{request.source}: "
        raise UserError(f"SRC: {name}{text}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _generate(request: Request, device: torch.device) -> None:
    tokenizer, run = _tokenizer_of(opening.small_files(find(request.source)))
    with opening.limited("its chat template or its tokenizer"):
        prompt = _encoded(request, tokenizer, run)
    if not prompt:
        raise CheckpointError("--prompt: found no tokens in it, expected at least one")
    model = _load(request, device)
    rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    if max(prompt) >= rows:
        raise CheckpointError(
            f"found token {max(prompt)} in the prompt, and {rows} rows in the embedding of the "
            "model, expected its own tokenizer"
        )
    ids = tokenizer.get_vocab().values()
    trained = None if run is None else run.read("SRC").get("config", {}).get("seq_length")
    limits = (longest_sequence(model.config.to_dict()), trained)
    window = min((each for each in limits if isinstance(each, int) and each > 0), default=2**31)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and len(prompt) > window:
        say(
            f"warning    the prompt has {len(prompt):,} tokens, and the model {window:,} positions:"
            f" the first {len(prompt) - window:,} are left out"
        )
    tokens = generate_tokens(
        model,
        prompt,
        request.max_tokens,
        Sampling(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
        ),
        vocab_size=min(1 + max(ids), rows),
        window=window,
        device=device,
        stop=end_tokens(model, tokenizer),
    )
    if not first:
        for _ in tokens:
            pass
        return
    if not request.chat:
        _print(request.prompt)
    stream: Any = _Words(tokenizer, skip_special_tokens=True)
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()


def _load(request: Request, device: torch.device) -> PreTrainedModel:
    """Load the model: full in a process on its own, else its shards."""
    where = find(request.source)
    adapters = find_adapters(opening.small_files(where))

    def opened() -> AbstractContextManager[Source]:
        if adapters is None:
            return open_source(where)
        from shardwise.pretrained.merging import open_merged  # imports peft

        return open_merged(adapters)

    dtype = "auto" if request.dtype is None else request.dtype.name.lower()
    with opened() as source:
        model = build_from(
            source, where, request.source, model_class=AutoModelForCausalLM, dtype=dtype
        )
    if dist.is_initialized():
        apply_wrap(model, AUTO, fully_shard)
        fully_shard(model)
    report = fill(model, request.source, opened=opened)
    if report.missing:
        raise CheckpointError(
            f"found no weights for {listed(report.missing)}, expected those of a causal language "
            "model"
        )
    if not dist.is_initialized():
        model.to(device)  # type: ignore[arg-type]
    return model


def _tokenizer_of(where: Path) -> tuple[Any, RunDir | None]:
    """The tokenizer of a model, and the run that the model is from."""
    runs = [where]
    with contextlib.suppress(CheckpointError):
        runs += folders_of(find_checkpoint(where))
    run = next((RunDir(each) for each in runs if RunDir(each).run_json.is_file()), None)
    folder = find_tokenizer(where)
    if folder is None and (adapters := find_adapters(where)) is not None:
        from shardwise.pretrained.merging import find_base  # imports peft

        folder = find_tokenizer(opening.small_files(find_base(adapters)))
    if folder is None and run is not None:  # it began before runs kept their tokenizers
        name = str(run.read("SRC").get("data", {}).get("tokenizer", "bytes"))
        return byte_tokenizer() if name == "bytes" else opening.tokenizer(name), run
    if folder is None:
        raise CheckpointError(
            "found no tokenizer, expected the files of one beside the weights, as "
            "tokenizer.save_pretrained writes them"
        )
    return opening.tokenizer(folder), run


def _encoded(request: Request, tokenizer: Any, run: RunDir | None) -> list[int]:
    """The tokens of a prompt: as in the documents of its run, or as its tokenizer makes them."""
    if request.chat:
        if not tokenizer.chat_template:
            raise CheckpointError("found no chat template in its tokenizer; leave out --chat")
        messages = [{"role": "user", "content": request.prompt}]
        try:
            found = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except CheckpointError:
            raise
        except Exception as error:  # a template is a program
            reason = one_line(error, 200)
            raise CheckpointError(f"its chat template cannot be used ({reason})") from error
        return [int(token) for token in found]
    start = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
    begin = [] if start is None else [int(start)]
    if run is not None:
        plain = tokenizer(request.prompt, add_special_tokens=False)["input_ids"]
        return [*begin, *map(int, plain)]
    return [int(token) for token in tokenizer(request.prompt)["input_ids"]] or begin


class _Words(TextStreamer):
    """Prints words as soon as they are complete."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        _print(text + "\n" * stream_end)


def _print(text: str) -> None:
    print(printable(text, keep="\n\t"), end="", flush=True)
