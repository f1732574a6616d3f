"""A language model learns from text: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from shardwise import FSDPModule
from shardwise.recipes.config import AdamWConfig
from shardwise.recipes.data import SEPARATOR, VOCAB_SIZE, decode
from shardwise.recipes.lm_config import LmInputs
from shardwise.recipes.model import (
    build,
    checkpoint_layers,
    decoder_layers,
    initialise,
    next_token_loss,
)
from shardwise.recipes.optim import make_adamw, warmup_cosine
from shardwise.recipes.progress import brief, printable
from shardwise.recipes.rundir import write_text
from shardwise.recipes.sample import sample_tokens
from shardwise.recipes.sharded import shard
from shardwise.recipes.task import Place, Task, no_more
from shardwise.recipes.text import TextBatches, ValidationLoss


def assemble(inputs: LmInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, AdamWConfig)
    model = build(inputs.settings, VOCAB_SIZE, SEPARATOR)
    if train.sharding.activation_checkpointing:
        checkpoint_layers(model)
    sharded = shard(model, decoder_layers(model), train.sharding, place)
    initialise(model, train.seed)
    curve = warmup_cosine(
        train.optimizer, inputs.span.steps_in_all(train.examples_per_step(place.world.size))
    )
    return Task(
        title=f"{config.model} on {inputs.text.name}",
        model_name=config.model,
        model=sharded,
        optimizer=make_adamw(model, train.optimizer),
        schedule=lambda position: curve(position.step),
        data=TextBatches(inputs.text, config, place.device),
        loss=next_token_loss,
        evaluate=ValidationLoss(model, inputs.text.validation, config, place.world, place.device),
        unit="tokens",
        units_per_example=config.seq_length,
        example=f"sequences x {config.seq_length} tokens",
        loss_unit="nats per token",
        introduction=[("data", _about(inputs))],
        finish=functools.partial(_write_sample, inputs, place, sharded),
    )


def _about(inputs: LmInputs) -> str:
    text = inputs.text
    return (
        f"{text.name}: {brief(len(text.train))} tokens to learn from, "
        f"{brief(len(text.validation))} held back; {text.files:,} "
        f"{'file' if text.files == 1 else 'files'}"
    )


def _write_sample(
    inputs: LmInputs,
    place: Place,
    model: FSDPModule,
    checkpoint: Path,
    results: Mapping[str, float],
) -> Mapping[str, float]:
    """What the model writes, once it has learnt."""
    config = inputs.config
    if not config.sample_tokens:
        return no_more(checkpoint, results)
    tokens = sample_tokens(
        model,
        [SEPARATOR, *config.prompt_text.encode()],
        config.sample_tokens,
        vocab_size=SEPARATOR,
        temperature=config.temperature,
        window=config.seq_length,
        seed=config.train.seed,
        device=place.device,
    )
    if place.world.rank == 0:
        text = config.prompt_text + decode(tokens)
        say = place.display.say
        write_text(config.files.sample, text + "\n")
        say(f"sample     {config.files.sample}")
        say("\n".join(f"    {line}".rstrip() for line in printable(text).split("\n")))
    return results
