"""``shardwise train lm``: options in, a configuration out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli import options
from shardwise.cli.diloco import Diloco
from shardwise.cli.grouped import grouped
from shardwise.cli.names import read_name
from shardwise.cli.run import run
from shardwise.recipes.core.config import AdamWConfig, Device, OptionError, TrainConfig
from shardwise.recipes.core.job import Job
from shardwise.recipes.text.config import PRESETS, LmConfig, defaults_for

EXAMPLES = """
[bold]Examples[/bold]

Two processes on this machine, about a minute:
  [cyan]shardwise train lm --nproc 2[/cyan]

Your own text, four processes, two copies of the model with two shards each:
  [cyan]shardwise train lm --nproc 4 --data 'notes/**/*.md' \\
    --strategy hybrid --replicas 2[/cyan]

Two replicas that meet every 50 steps, as over a slow link:
  [cyan]shardwise train lm --nproc 2 --strategy diloco --replicas 2 \\
    --local-steps 50[/cyan]

Go on with a run that was stopped, or train a finished one for longer:
  [cyan]shardwise train lm --nproc 2 --out runs/lm --resume --steps 900[/cyan]

Documents of the Hugging Face hub, half a million tokens a step:
  [cyan]shardwise train lm --nproc 8 --data hf:allenai/c4:en --model llama-150m \\
    --tokenizer gpt2 --batch-tokens 524288[/cyan]

Two hosts, a copy of the model on each; on the second, --node-rank 1:
  [cyan]shardwise train lm --nproc 8 --strategy hybrid --nnodes 2 --node-rank 0 \\
    --rdzv host-a:29400[/cyan]

Hosts that join while it trains; only the first says --node-rank 0 too:
  [cyan]shardwise train lm --nproc 8 --strategy diloco --nnodes 1:4 \\
    --rdzv host-a:29400[/cyan]

In a world that torchrun made:
  [cyan]torchrun --nproc-per-node 2 -m shardwise train lm --model llama-34m[/cyan]
"""

_SAMPLE = "Sample"


@grouped
def train_lm(
    *,
    launch: options.Launch = options.Launch(),
    model: Annotated[
        str,
        Option(
            parser=read_name,
            metavar="NAME",
            help=f"{', '.join(PRESETS)}, or the path of a config.json of transformers.",
            rich_help_panel=options.MODEL,
        ),
    ] = "llama-tiny",
    data: Annotated[
        list[str] | None,
        Option(
            parser=read_name,
            metavar="TEXT",
            help="Text to learn from: files, folders, patterns; .jsonl and .parquet are streamed; "
            "hf:NAME:CONFIG is a dataset of the Hugging Face hub.",
            rich_help_panel=options.MODEL,
            show_default="the Python standard library's source",
        ),
    ] = None,
    more_data: Annotated[
        list[str] | None, Argument(parser=read_name, hidden=True, metavar="FILES")
    ] = None,
    tokenizer: Annotated[
        str | None,
        Option(
            parser=read_name,
            metavar="NAME",
            help="A tokenizer of transformers, by name or folder; documents are streamed then.",
            rich_help_panel=options.MODEL,
            show_default="bytes",
        ),
    ] = None,
    streams: Annotated[
        int | None,
        Option(
            help="Streams that documents are dealt out to; the world size should divide it.",
            rich_help_panel=options.MODEL,
            show_default="by world size, 8 or more",
        ),
    ] = None,
    shuffle_buffer: Annotated[
        int,
        Option(
            help="Documents of each stream that are shuffled together, by --seed; 0: the order of "
            "the source.",
            rich_help_panel=options.MODEL,
        ),
    ] = 0,
    seq_length: Annotated[
        int | None,
        Option(
            help="Tokens of a sequence.",
            rich_help_panel=options.MODEL,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        Option(
            help="Optimizer steps, from the beginning of the run.",
            rich_help_panel=options.STEP,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(
            help="Sequences per rank and microbatch.",
            rich_help_panel=options.STEP,
            show_default=options.BY_MODEL,
        ),
    ] = None,
    accumulate: options.Accumulate = 1,
    batch_tokens: Annotated[
        int | None,
        Option(
            help="Tokens of a step over all ranks; --accumulate follows from it, and --batch-size "
            "is the most sequences of a microbatch.",
            rich_help_panel=options.STEP,
            show_default=False,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        Option(
            help="Peak learning rate.", rich_help_panel=options.STEP, show_default=options.BY_MODEL
        ),
    ] = None,
    warmup: Annotated[
        int,
        Option(
            help="Steps over which the learning rate rises; a cosine follows.",
            rich_help_panel=options.STEP,
        ),
    ] = 20,
    beta1: Annotated[float, Option(help="AdamW's first beta.", rich_help_panel=options.STEP)] = 0.9,
    beta2: Annotated[
        float, Option(help="AdamW's second beta.", rich_help_panel=options.STEP)
    ] = 0.95,
    weight_decay: Annotated[
        float, Option(help="On matrices, not on norms.", rich_help_panel=options.STEP)
    ] = 0.1,
    clip_grad: options.ClipGrad = 1.0,
    seed: options.Seed = 0,
    device: options.OnDevice = Device.AUTO,
    peak_flops: Annotated[
        float | None,
        Option(
            help="Operations a second of one device, for MFU.",
            rich_help_panel=options.STEP,
            show_default="from a table of GPUs",
        ),
    ] = None,
    sharding: options.Sharding = options.Sharding(),
    diloco: Diloco = Diloco(),
    output: options.LmOutput = options.LmOutput(out=Path("runs/lm"), checkpoint_every=100),
    prompt: Annotated[
        str | None,
        Option(
            help="What the sample begins with.",
            rich_help_panel=_SAMPLE,
            show_default="a line of Python, or nothing with --data",
        ),
    ] = None,
    sample_tokens: Annotated[
        int, Option(help="Length of the sample; 0: none.", rich_help_panel=_SAMPLE)
    ] = 200,
    temperature: Annotated[
        float, Option(help="0: the likeliest token, always.", rich_help_panel=_SAMPLE)
    ] = 0.9,
) -> None:
    """Train a language model on text, sharded over processes.

    A Llama learns to continue text, byte by byte. Every process keeps its part of
    the parameters, gradients and optimizer state.
    """
    if more_data and not data:
        raise OptionError("arguments", " ".join(more_data), "options; text goes behind --data")
    nodes = launch.nodes()
    defaults = defaults_for(model)
    config = LmConfig(
        model=model,
        data=(*(data or ()), *(more_data or ())),
        seq_length=defaults.seq_length if seq_length is None else seq_length,
        prompt=prompt,
        sample_tokens=sample_tokens,
        temperature=temperature,
        tokenizer=tokenizer,
        streams=streams,
        shuffle_buffer=shuffle_buffer,
        batch_tokens=batch_tokens,
        peak_flops=peak_flops,
        train=TrainConfig(
            steps=defaults.steps if steps is None else steps,
            batch_size=defaults.batch_size if batch_size is None else batch_size,
            accumulate=accumulate,
            seed=seed,
            device=device,
            peer_timeout=launch.peer_timeout,
            optimizer=AdamWConfig(
                lr=defaults.lr if lr is None else lr,
                betas=(beta1, beta2),
                weight_decay=weight_decay,
                warmup=warmup,
                clip_grad=clip_grad,
            ),
            sharding=sharding.config(nodes),
            output=output.config(),
            diloco=diloco.config(sharding.strategy),
        ),
    )
    run(Job(config), launch.nproc, nodes, launch.max_restarts)
