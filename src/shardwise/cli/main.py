"""The command ``shardwise``: registers the commands, one file each."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from shardwise.cli import checkpoint, inspect, train_lm
from shardwise.cli.errors import UsageError, describe
from shardwise.launch.errors import UserError

cli = typer.Typer(
    name="shardwise",
    help="Fully sharded data parallel training that you can see into.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
train = typer.Typer(
    name="train", help="Train a model over several processes.", invoke_without_command=True
)
cli.add_typer(train)
cli.add_typer(checkpoint.commands)
train.command("lm", epilog=train_lm.EXAMPLES)(train_lm.train_lm)
cli.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {metadata.version('shardwise')}")
        raise typer.Exit


@checkpoint.commands.callback()
def _checkpoint(context: typer.Context) -> None:
    _help_if_alone(context)


@train.callback()
def _train(context: typer.Context) -> None:
    _help_if_alone(context)


@cli.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def app() -> NoReturn:
    """Run the command line: a mistake of its user is one line on stderr and exit code 2."""
    try:
        code = cli(standalone_mode=False)
    except UserError as error:
        _end(str(error), error.exit_code)
    except UsageError as error:
        _end(describe(error, sys.argv[1:]), 2)
    except KeyboardInterrupt:
        _end("stopped", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _end(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
