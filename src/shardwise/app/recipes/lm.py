"""``shardwise train lm``: a language model of ``transformers`` on text, and a sample at the end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise import FSDPModule, pretrained
from shardwise.app.recipes.core.build import compile_blocks, learning_rate, program_of, shard
from shardwise.app.recipes.core.model import (
    Sampling,
    Utilization,
    build,
    config_json,
    decoder_layers,
    end_tokens,
    generate_tokens,
    initialize,
    next_token_loss,
)
from shardwise.app.recipes.core.recipe import Example, Task, TrainContext
from shardwise.app.recipes.core.rundir import write_text
from shardwise.app.recipes.text.batches import open_data
from shardwise.app.recipes.text.config import LmConfig, LmInputs, Packing
from shardwise.app.recipes.text.data import Tokenizer, Vocabulary, load_vocabulary
from shardwise.app.recipes.text.published import Frozen, allowed, frozen_bytes
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.progress import progress
from shardwise.base.units import binary_size, listed, printable
from shardwise.checkpoint.disk.place import Place
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.schema.sharding import Gathers
from shardwise.insight.schema.training import OptimizerConfig
from shardwise.insight.token_loss import TokenLoss

if TYPE_CHECKING:
    from shardwise.app.recipes.text.adapters import Adapters


def assemble(inputs: LmInputs, place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, OptimizerConfig)
    vocabulary = load_vocabulary(config.tokenizer_name, config.tokenizer_option)
    model = _build(inputs.settings, config, vocabulary)
    introduction: list[tuple[str, object]] = [*_notes(config, vocabulary, model)]
    data = open_data(inputs.text, vocabulary, config, place)
    introduction += [("data", data.summary), *([("warning", data.notes)] if data.notes else [])]
    adapters = None if config.lora is None else _adapters(model, config)
    blueprint = Blueprint(config.model, model, decoder_layers(model))
    program = program_of(blueprint, train, place, data.loss)
    sharded = shard(program, place)
    if config.pretrained is None:
        initialize(model, train.seed)
    else:
        with _reading(config.pretrained, place):
            introduction.append(("weights", _fill(model, adapters, config.pretrained, train.seed)))
    if adapters is not None:
        frozen, how = adapters.decide(sharded, place)
        program = replace(program, gathers=_gathers(frozen))
        introduction += [("adapters", str(adapters)), ("frozen", how)]
    if config.packing is Packing.PACKED and config.chat:
        from shardwise.app.recipes.text.conversations import check_apart

        check_apart(model, vocabulary.used, config.model, place.device)
    if train.sharding.compile:
        compile_blocks(blueprint.blocks)
    span = replace(inputs.span, per_epoch=data.per_epoch)
    steps = span.steps_in_all(train.examples_per_step(place.readers.size))
    curve = learning_rate(train.optimizer, steps)
    optimizer = program.make_optimizer()
    assert optimizer is not None
    replicas = None
    if train.diloco is not None:
        from shardwise.app.recipes.core.replicas import replicas_of  # which imports DiLoCo

        optimizer, replicas = replicas_of(
            model, optimizer, place.mesh, place.replica, train, config.seq_length
        )
        introduction.append(("replicas", str(train.diloco)))
    use = Utilization.of(model, config.seq_length, place.device, config.peak_flops)
    # Where a published model ends an answer, above all.
    generation = None if config.pretrained is None else model.generation_config
    return Task(
        model_name=config.model,
        program=program,
        model_config=config_json(model),
        generation_config=None if generation is None else str(generation.to_json_string()),
        save_tokenizer=lambda folder: vocabulary.as_transformers().save_pretrained(folder),
        optimizer=optimizer,
        schedule=lambda position: curve(position.step),
        data=data.batches,
        targets=data.targets,
        evaluate=data.evaluation(model),
        unit="tokens",
        units_per_example=config.seq_length,
        peak_units_per_s=use.peak_tokens_per_s(place.world.size),
        span=span,
        position=data.position,
        example=f"sequences x {config.seq_length} tokens",
        introduction=[*introduction, ("compute", str(use))],
        close=data.close,
        base=None if adapters is None else config.pretrained,
        replicas=replicas,
        finish=functools.partial(_finish, inputs, place, sharded, vocabulary, adapters),
    )


def _build(settings: dict[str, Any], config: LmConfig, vocabulary: Vocabulary) -> PreTrainedModel:
    """Build the model on the meta device.

    Raises:
        UserError: it cannot be built.
    """
    if config.pretrained is None:
        return build(settings, vocabulary.size, vocabulary.separator)
    with _naming(config.pretrained):
        model = pretrained.build(
            config.pretrained,
            model_class=AutoModelForCausalLM,
            dtype=torch.float32,
            use_cache=False,
        )
    model.train()
    return model


def _adapters(model: PreTrainedModel, config: LmConfig) -> Adapters:
    """Put adapters on a model. Other trainings need no ``peft``, which takes a second to import."""
    from shardwise.app.recipes.text.adapters import Adapters

    return Adapters(model, config)


def _reading(name: str, place: TrainContext) -> AbstractContextManager[object]:
    """Say on rank 0 that weights are read, if it takes long."""
    if place.world.rank != 0:
        return contextlib.nullcontext()
    size = sum(file.stat().st_size for file in Path(name).glob("**/*.safetensors"))
    return progress(f"reading {name}{f', {binary_size(size)}' if size else ''}")


def _fill(model: PreTrainedModel, adapters: Adapters | None, name: str, seed: int) -> str:
    """Load published weights into the shards; return what came of it."""
    torch.manual_seed(seed)
    with _naming(name):
        report = pretrained.fill(model, name) if adapters is None else adapters.fill(seed)
    if not report.missing:
        return f"all from {name}"
    return f"from {name}, which lacks {listed(report.missing)}: initialized by --seed"


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Report an error of a published model as one of the option that names it."""
    try:
        yield
    except (CheckpointError, ValueError, TypeError) as error:
        raise UserError(f"--from {name}: {error}") from error


def _notes(
    config: LmConfig, vocabulary: Vocabulary, model: PreTrainedModel
) -> list[tuple[str, str]]:
    """Return lines about what may not be as the user expects.

    Raises:
        OptionError: the model has too few rows for the tokenizer.
    """
    if config.pretrained is not None:
        assert isinstance(vocabulary, Tokenizer)
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, torch.Tensor)
        note = vocabulary.fit(len(embedding))
        return [("warning", note)] if note else []
    path = Path(config.model)
    folder = path if path.is_dir() else path.parent
    if path.exists() and any(folder.glob("*.safetensors")):
        text = f"{config.model} has weights, and --model trains from scratch: --from uses them"
        return [("warning", text)]
    return []


def blueprint(config: LmConfig) -> Blueprint:
    """Return the model without memory, and how it is sharded.

    Raises:
        OptionError: the tokenizer cannot be loaded, or ``transformers`` cannot build the model.
    """
    model = _build(
        config.settings(), config, load_vocabulary(config.tokenizer_name, config.tokenizer_option)
    )
    if config.lora is not None:
        _adapters(model, config)  # which changes the model
    return Blueprint(config.model, model, decoder_layers(model))


def example(config: LmConfig) -> Example:
    """Return the batches of documents, and their loss; those of chats have the same size."""

    def batch(count: int) -> torch.Tensor:
        return torch.zeros(count, config.seq_length + 1, dtype=torch.long)

    def gathers(model: nn.Module, reshard_after_forward: bool | int, free: int) -> Gathers:
        if config.lora is None:
            return Gathers.EVERY_MICROBATCH
        needed = frozen_bytes(model, config.train.sharding.compute_dtype)
        asked = config.frozen or allowed(needed, free)
        return _gathers(asked if reshard_after_forward else Frozen.KEEP)

    loss = functools.partial(next_token_loss, loss=TokenLoss(config.logits))
    return Example(batch=batch, loss=loss, seq_length=config.seq_length, gathers=gathers)


def _gathers(frozen: Frozen) -> Gathers:
    return Gathers.EVERY_STEP if frozen is Frozen.KEEP else Gathers.EVERY_MICROBATCH


def _prompt(inputs: LmInputs, vocabulary: Vocabulary) -> tuple[str, list[int]]:
    """Return what the sample continues: for people, and as tokens.

    After a training on chats, a question of those that are held out, or --prompt in its place.
    """
    config = inputs.config
    if config.chat:
        from shardwise.app.recipes.text.chat import ChatData, ChatEncoder

        assert isinstance(inputs.text, ChatData)
        assert isinstance(vocabulary, Tokenizer)
        encoder, lines = ChatEncoder(vocabulary), inputs.text.validation
        asked = (encoder.question(lines.read(i), config.prompt) for i in range(len(lines)))
        if (found := next(filter(None, asked), None)) is not None and found[1]:
            return found
    text = config.prompt_text
    return text, [vocabulary.separator, *vocabulary.encode(text)]


def _finish(
    inputs: LmInputs,
    place: TrainContext,
    model: FSDPModule,
    vocabulary: Vocabulary,
    adapters: Adapters | None,
    checkpoint: Place,
    results: Mapping[str, float],
) -> Mapping[str, float]:
    """Write the adapters, if there are any, and a sample of what the trained model generates."""
    if adapters is not None:
        adapters.write(place, vocabulary.as_transformers())
    config = inputs.config
    if not config.sample_tokens:
        return results
    prompt, begin = _prompt(inputs, vocabulary)
    with torch.compiler.set_stance("force_eager"):  # every token would have a graph of its own
        drawn = generate_tokens(
            cast("nn.Module", model),
            begin,
            config.sample_tokens,
            Sampling(temperature=config.temperature, seed=config.train.seed),
            vocab_size=vocabulary.used,
            window=config.seq_length,
            device=place.device,
            stop=end_tokens(model, vocabulary.as_transformers()) if config.chat else frozenset(),
        )
        tokens = list(drawn)
    if place.world.rank == 0:
        text = prompt + vocabulary.decode(tokens)
        say = place.display.say
        write_text(config.files.sample, text + "\n")
        say(f"sample     {config.files.sample}")
        say("\n".join(f"    {line}".rstrip() for line in printable(text, keep="\n\t").split("\n")))
    return results
