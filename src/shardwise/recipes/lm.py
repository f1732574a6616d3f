"""A language model learns from text: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from shardwise import FSDPModule
from shardwise.recipes.config import AdamWConfig
from shardwise.recipes.flops import Utilisation
from shardwise.recipes.lm_config import LmInputs
from shardwise.recipes.lm_data import open_data
from shardwise.recipes.model import (
    build,
    checkpoint_layers,
    config_json,
    decoder_layers,
    initialise,
    next_token_loss,
)
from shardwise.recipes.optim import make_adamw, warmup_cosine
from shardwise.recipes.replicas import replicas_of
from shardwise.recipes.rundir import write_text
from shardwise.recipes.sample import sample_tokens
from shardwise.recipes.sharded import shard
from shardwise.recipes.task import Place, Task, no_more
from shardwise.recipes.text import ValidationLoss
from shardwise.recipes.tokens import Vocabulary
from shardwise.units import printable


def assemble(inputs: LmInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, AdamWConfig)
    data = open_data(inputs.text, config, place.world, place.device)
    model = build(inputs.settings, data.vocabulary.size, data.vocabulary.separator)
    if train.sharding.activation_checkpointing:
        checkpoint_layers(model)
    sharded = shard(model, decoder_layers(model), train.sharding, place)
    initialise(model, train.seed)
    curve = warmup_cosine(
        train.optimizer, inputs.span.steps_in_all(train.examples_per_step(place.world.size))
    )
    optimizer: torch.optim.Optimizer = make_adamw(model, train.optimizer)
    introduction, replicas = [("data", data.summary)], None
    if train.diloco is not None:
        optimizer, replicas = replicas_of(model, optimizer, place.mesh, train.diloco)
        introduction.append(("replicas", str(train.diloco)))
    use = Utilisation.of(model, config.seq_length, place.device, config.peak_flops)
    return Task(
        title=f"{config.model} on {inputs.text.name}",
        model_name=config.model,
        model=sharded,
        model_config=config_json(model),
        optimizer=optimizer,
        schedule=lambda position: curve(position.step),
        data=data.batches,
        loss=next_token_loss,
        evaluate=ValidationLoss(model, data.validation, config, place.world, place.device),
        unit="tokens",
        units_per_example=config.seq_length,
        peak_units_per_s=use.peak_tokens_per_s(place.world.size),
        position=data.position,
        example=f"sequences x {config.seq_length} tokens",
        loss_unit="nats per token",
        introduction=[*introduction, ("compute", str(use))],
        close=data.close,
        replicas=replicas,
        finish=functools.partial(_write_sample, inputs, place, sharded, data.vocabulary),
    )


def _write_sample(
    inputs: LmInputs,
    place: Place,
    model: FSDPModule,
    vocabulary: Vocabulary,
    checkpoint: Path,
    results: Mapping[str, float],
) -> Mapping[str, float]:
    """What the model writes, once it has learnt."""
    config = inputs.config
    if not config.sample_tokens:
        return no_more(checkpoint, results)
    tokens = sample_tokens(
        model,
        [vocabulary.separator, *vocabulary.encode(config.prompt_text)],
        config.sample_tokens,
        vocab_size=vocabulary.used,
        temperature=config.temperature,
        window=config.seq_length,
        seed=config.train.seed,
        device=place.device,
    )
    if place.world.rank == 0:
        text = config.prompt_text + vocabulary.decode(tokens)
        say = place.display.say
        write_text(config.files.sample, text + "\n")
        say(f"sample     {config.files.sample}")
        say("\n".join(f"    {line}".rstrip() for line in printable(text, keep="\n\t").split("\n")))
    return results
