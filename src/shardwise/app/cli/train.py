"""``shardwise train``: a command for each recipe, with options generated from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.app.cli.config_file import (
    FileOption,
    options_of_run,
    read_options,
    save,
    written,
)
from shardwise.app.cli.options import (
    Options,
    PathOption,
    Unset,
    help_if_alone,
    keyword_only,
    parameter_name,
    read_name,
    said,
    with_options,
)
from shardwise.app.cli.run import LaunchConfig, run
from shardwise.app.recipes.core.job import Folder, TrainingJob
from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.base.errors import UserError
from shardwise.base.units import show
from shardwise.elastic.world import find_world
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import DilocoConfig, OptimizerConfig

_LM = """
[bold]Examples[/bold]

Two processes on this machine, about a minute:
  [cyan]shardwise train lm --nproc 2[/cyan]

Your own text, four processes, two copies of the model with two shards each:
  [cyan]shardwise train lm --nproc 4 --data 'notes/**/*.md' \\
    --strategy hybrid --replicas 2[/cyan]

A published model, fine-tuned on chats:
  [cyan]shardwise train lm --nproc 2 --from Qwen/Qwen3-0.6B --chat chats.jsonl \\
    --epochs 3[/cyan]

Two replicas that exchange parameters every 50 steps, as over a slow link:
  [cyan]shardwise train lm --nproc 2 --strategy diloco --replicas 2 \\
    --local-steps 50[/cyan]

Go on with a run that was stopped, or train a finished one for longer:
  [cyan]shardwise train lm --nproc 2 --out runs/lm --resume --steps 900[/cyan]

Documents of the Hugging Face Hub, half a million tokens per step:
  [cyan]shardwise train lm --nproc 8 --data hf:allenai/c4:en --model llama-150m \\
    --tokenizer gpt2 --batch-tokens 524288[/cyan]

Two hosts, a copy of the model on each; on the second, --node-rank 1:
  [cyan]shardwise train lm --nproc 8 --strategy hybrid --nnodes 2 --node-rank 0 \\
    --rdzv host-a:29400[/cyan]

Hosts that may join later; only the first one needs --node-rank 0:
  [cyan]shardwise train lm --nproc 8 --strategy diloco --nnodes 1:4 \\
    --rdzv host-a:29400[/cyan]

Under torchrun:
  [cyan]torchrun --nproc-per-node 2 -m shardwise train lm --model llama-34m[/cyan]
"""

_MNIST = """
[bold]Examples[/bold]

Two processes; the folder has MNIST's four files, gzipped or not:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2[/cyan]

Each convolution block a group of its own, activations recomputed:
  [cyan]shardwise train mnist --data-dir mnist --nproc 2 --nested-fsdp \\
    --activation-checkpointing full[/cyan]
"""

_IMAGENET = """
[bold]Examples[/bold]

The published schedule, on 8 GPUs; the folder has train/CLASS/ and val/CLASS/:
  [cyan]shardwise train imagenet --data-dir imagenet --model resnet50 --nproc 8[/cyan]

A small network on images of your own, on two CPUs:
  [cyan]shardwise train imagenet --data-dir images --model resnet18 \\
    --image-size 96 --nproc 2 --batch-size 16 --lr 0.05 --epochs 20 \\
    --warmup-epochs 1[/cyan]

Speed without reading images:
  [cyan]shardwise train imagenet --fake-data --nproc 2 --batch-size 8 --steps 20[/cyan]
"""

_VIT = """
[bold]Examples[/bold]

What each of 128 ranks would hold of 10 billion parameters, without training:
  [cyan]shardwise train vit --model vit-10b --dry-run --world-size 128[/cyan]

ImageNet, on 8 GPUs; the folder has train/CLASS/ and val/CLASS/:
  [cyan]shardwise train vit --data-dir imagenet --model vit-huge --nproc 8 \\
    --param-dtype bf16 --activation-checkpointing full[/cyan]

Speed without reading images, on two CPUs:
  [cyan]shardwise train vit --fake-data --nproc 2 --batch-size 4 --steps 10[/cyan]
"""


def _file_option(name: str, help_text: str) -> Parameter:
    info = PathOption(name, help=help_text)
    return keyword_only(parameter_name(name), Annotated[Path | None, info], None)


_FILES = (
    _file_option("--config", "Options in YAML, by their names; those of the command line win."),
    _file_option("--save-config", "Write the options to a new file for --config, and exit."),
)

_TEXTS = keyword_only(
    "texts",
    Annotated[
        list[str] | None,
        typer.Argument(
            parser=read_name, metavar="TEXT", help="The same as --data.", show_default=False
        ),
    ],
    None,
)

#: Options that say the same, or cannot be beside each other: one that is named replaces the others
#: in a file, and in the run that goes on.
_REPLACES: Mapping[str, tuple[str, ...]] = {
    "--from": ("--model",),
    "--model": ("--from",),
    "--chat": ("--data",),
    "--data": ("--chat",),
    "--epochs": ("--steps",),
    "--strategy": ("--mesh", "--replicas"),
    "--mesh": ("--replicas",),
    "--replicas": ("--mesh",),
    "--accumulate": ("--batch-tokens",),
    "--batch-tokens": ("--accumulate",),
}

_STRATEGIES = ", ".join(each.value for each in Strategy if each is not Strategy.DILOCO)
_BY_EPOCHS = {
    "strategy": {"help": f"What is sharded: {_STRATEGIES}."},
    "batch_size": {"help": "Images per rank and microbatch."},
    "steps": {"help": "End after this many optimizer steps, if that is before --epochs."},
    "eval_every": {"help": "Epochs between evaluations; 0: only at the end."},
}


def _options_of(recipe: str) -> Options[RecipeConfig]:
    """Return the options of a training. Its configuration is imported now: each takes a moment."""
    if recipe == "lm":
        from shardwise.app.recipes.text.config import DEFAULTS

        return Options(
            default=DEFAULTS[recipe].with_train(diloco=DilocoConfig()),
            shows={
                "batch_size": {"help": "Sequences per rank and microbatch."},
                "epochs": {"help": "Epochs of the whole run, in place of --steps."},
            },
            by_model=frozenset({"steps", "batch_size", "seq_length", "lr"}),
        )
    from shardwise.app.recipes.vision.config import DEFAULTS as IMAGES

    return Options(
        default=IMAGES[recipe],
        shows=_BY_EPOCHS,
        by_model=frozenset({"batch_size", "image_size"} if recipe == "vit" else ()),
    )


def add_to(cli: typer.Typer, *words: str) -> None:
    """Register the commands: of all trainings, or of the one that the next words begin with."""
    commands = typer.Typer(
        name="train", help="Train a model over several processes.", invoke_without_command=True
    )
    commands.callback()(help_if_alone)
    named = [word for word in words[:1] if word in _TRAININGS]
    for recipe in named or _TRAININGS:
        help_text, examples = _TRAININGS[recipe]
        commands.command(recipe, epilog=examples)(_command(_options_of(recipe), help_text))
    cli.add_typer(commands)


def _command(options: Options[RecipeConfig], help_text: str) -> Callable[..., None]:
    """Return the function of a training's command, with its options."""
    launch, default = Options(default=LaunchConfig()), options.default
    # Texts are as long as they are read, and images as the epochs: then steps only end them sooner.
    replaces = {**_REPLACES, **({"--steps": ("--epochs",)} if default.train.epochs is None else {})}

    def act(given: Mapping[str, Any]) -> None:
        if more := given.get("texts"):
            option = "data" if given["chat"] is None else "chat"
            given = {**given, option: [*(given[option] or ()), *more]}
        file: dict[str, FileOption] = {}
        if given["config"] is not None:
            file = read_options(given["config"], [launch, options], f"train {default.recipe}")
        on_line = {s.key for each in (launch, options) for s in each.settings() if said(s, given)}
        drop(file, on_line)
        try:
            start(given, on_line, file)
        except UserError as error:
            name = getattr(error, "option", None)
            if name not in file or name in on_line:
                raise
            located = UserError(f"{error} ({file[name].place})")
            located.exit_code = error.exit_code
            raise located from error

    def drop(lower: dict[str, FileOption], named: Collection[str]) -> None:
        """Drop what named options replace."""
        for name in {*named}.intersection(replaces):
            for other in (name, *replaces[name]):
                lower.pop(other, None)

    def start(
        given: Mapping[str, Any], on_line: Collection[str], file: dict[str, FileOption]
    ) -> None:
        launching = launch.read(given, None, {name: found.value for name, found in file.items()})
        config, text = compose(given, file, launching)
        named = {*on_line, *file}
        job = TrainingJob(config, Folder.NAMED if "--out" in named else Folder.DEFAULT, text)
        # Several hosts may each have a disk of their own, and would each choose for themselves.
        if launching.nnodes is None and find_world() is None:
            job.choose_folder()
        if record := job.going_on():
            run_file = str(job.config.files.run_json)
            of_run = options_of_run(record, options, run_file)
            drop(of_run, named)
            of_run = {name: found for name, found in of_run.items() if name not in named}
            file |= of_run
            job.go_on(*compose(given, file, launching, of_run))
        if given["save_config"] is not None:
            save(given["save_config"], job.options_file)
            show(f"options    {given['save_config']}")
            return
        run(job, launching)

    def compose(
        given: Mapping[str, Any],
        file: Mapping[str, FileOption],
        launching: LaunchConfig,
        of_run: Collection[str] = (),
    ) -> tuple[RecipeConfig, str]:
        """Return the configuration, and the file that repeats it.

        Args:
            given: the command line.
            file: what it does not say.
            launching: how many processes, and where.
            of_run: which of these a run says that goes on.
        """
        in_file = {name: found.value for name, found in file.items()}

        def asked(name: str) -> Any:
            value = given.get(parameter_name(name))
            value = in_file.get(name) if value is None else value
            return None if value is Unset.UNSET else value

        config = default
        if (weights := asked("--from")) is not None:
            config = default.for_pretrained(weights)
        elif (model := asked("--model")) is not None:
            config = default.for_model(model) or default
        if (algorithm := asked("--optimizer")) is not None:
            assert isinstance(config.train.optimizer, OptimizerConfig)
            config = config.with_train(optimizer=config.train.optimizer.usual_for(algorithm))
        config = config.with_train(diloco=default.train.diloco)
        config = options.read(given, config, in_file)
        strategy = config.train.sharding.strategy
        if default.train.diloco is not None and strategy is not Strategy.DILOCO:
            for setting in options.settings():
                mine = "diloco" in setting.keys and setting.key not in of_run
                if mine and any(asked(name) is not None for name in setting.flags or [setting.key]):
                    expected = "--strategy diloco with it"
                    raise OptionError(setting.key, f"strategy {strategy.value}", expected)
            config = config.with_train(diloco=None)
        if asked("--epochs") is not None and asked("--steps") is None:
            config = config.with_train(steps=None)  # in place of a default number
        processes = ((s, v) for s, v in launch.values_of(launching) if v != s.default)
        values = (*processes, *options.values_of(config))
        return config, written(f"shardwise train {default.recipe}", values)

    texts = [_TEXTS] if default.recipe == "lm" else []
    return with_options(act, [launch, options], help_text, [*texts, *_FILES])


#: Of each training: its help, and the end of that.
_TRAININGS: dict[str, tuple[str, str]] = {
    "lm": (
        """Train a language model on text, sharded over processes.

        A Llama learns to continue text, byte by byte. Every process keeps its part of
        the parameters, gradients and optimizer state.
        """,
        _LM,
    ),
    "mnist": (
        """Train a convolutional network on MNIST, sharded over processes.

        At the end the model is written as one safetensors file, loaded into a plain
        module, and evaluated again; a chart shows which digits it confuses.
        """,
        _MNIST,
    ),
    "imagenet": (
        """Train a residual network on images in folders, sharded over processes.

        The defaults are ImageNet's published schedule for 1,024 images per step. At
        the end the model is written as one safetensors file, loaded into a plain
        module, and evaluated again.
        """,
        _IMAGENET,
    ),
    "vit": (
        """Train a Vision Transformer on images in folders, built block by block.

        Neither a host nor a device ever holds the full model. The defaults are those
        of PyTorch/XLA's example with 10 billion parameters, for 1,024 images per
        step. At the end the model is written as one safetensors file, loaded into new
        shards, and evaluated again.
        """,
        _VIT,
    ),
}
