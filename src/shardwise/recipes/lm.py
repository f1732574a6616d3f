"""``shardwise train lm``: a language model of ``transformers`` on text, and a sample at the end.

Every rank draws the same tokens from the same logits, since all have the same seed; each forward
gathers the shards of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from shardwise import FSDPModule
from shardwise.inspect.api import Blueprint
from shardwise.recipes.core.build import kept_between_forwards, make_adamw, shard, warmup_cosine
from shardwise.recipes.core.config import AdamWConfig
from shardwise.recipes.core.model import (
    Utilization,
    build,
    checkpoint_layers,
    config_json,
    decoder_layers,
    initialize,
    next_token_loss,
)
from shardwise.recipes.core.recipe import Place, Task, no_more
from shardwise.recipes.core.replicas import replicas_of
from shardwise.recipes.core.rundir import write_text
from shardwise.recipes.text.batches import ValidationLoss, open_data
from shardwise.recipes.text.config import LmConfig, LmInputs
from shardwise.recipes.text.data import Vocabulary, load_vocabulary
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
    initialize(model, train.seed)
    curve = warmup_cosine(
        train.optimizer, inputs.span.steps_in_all(train.examples_per_step(place.world.size))
    )
    optimizer: torch.optim.Optimizer = make_adamw(model, train.optimizer)
    introduction, replicas = [("data", data.summary)], None
    if train.diloco is not None:
        optimizer, replicas = replicas_of(model, optimizer, place.mesh, train.diloco)
        introduction.append(("replicas", str(train.diloco)))
    use = Utilization.of(model, config.seq_length, place.device, config.peak_flops)
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


def blueprint(config: LmConfig) -> Blueprint:
    """Return the model without memory, and how it is sharded.

    Raises:
        OptionError: the tokenizer cannot be loaded, or ``transformers`` cannot build the model.
    """
    vocabulary = load_vocabulary(config.tokenizer)
    model = build(config.settings(), vocabulary.size, vocabulary.separator)
    return Blueprint(config.model, model, decoder_layers(model))


def _write_sample(
    inputs: LmInputs,
    place: Place,
    model: FSDPModule,
    vocabulary: Vocabulary,
    checkpoint: Path,
    results: Mapping[str, float],
) -> Mapping[str, float]:
    """Write a sample of what the trained model generates."""
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


# Up to this size the parameters stay whole from token to token; a larger model is gathered anew.
KEEP_WHOLE_BYTES = 2**28


@torch.no_grad()
def sample_tokens(
    model: FSDPModule,
    prompt: Sequence[int],
    count: int,
    *,
    vocab_size: int,
    temperature: float,
    window: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue a prompt. Every rank calls it and gets the same tokens.

    Args:
        model: a causal language model of ``transformers``.
        prompt: at least one token.
        count: tokens to draw.
        vocab_size: tokens from here up are never drawn.
        temperature: 0 takes the likeliest token; 1 draws as the model has learned.
        window: the most tokens that the model looks back at, as in training; where they are
            full, the older half is forgotten.
        seed: of the drawing.
        device: where the model computes.
    """
    module = model
    assert isinstance(module, nn.Module)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    drawn: list[int] = []
    context = list(prompt)[-window:]
    cache = None
    whole = size <= KEEP_WHOLE_BYTES
    with model.keep_unsharded() if whole else kept_between_forwards(module):
        for _ in range(count):
            if len(context) > window:
                context, cache = context[-max(1, window // 2) :], None
            # With a cache the model remembers all but the newest token.
            fresh = context if cache is None else context[-1:]
            inputs = torch.tensor([fresh], device=device)
            output = module(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
            logits = output.logits[0, -1, :vocab_size].float().cpu()
            drawn.append(_draw(logits, temperature, generator))
            context.append(drawn[-1])
    return drawn


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    odds = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(odds, 1, generator=generator))
