"""The command ``shardwise``: registers the commands, one file each."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from shardwise import __version__
from shardwise.cli import (
    checkpoint,
    doctor,
    inspect,
    launch_lines,
    train_imagenet,
    train_lm,
    train_mnist,
    train_vit,
)
from shardwise.cli.errors import UsageError, describe
from shardwise.launch.errors import UserError
from shardwise.units import printable

_LONGEST = 2000  # characters of a message
_STOPPED, _UNREAD = 130, 141  # 128 and the signal, as shells count: SIGINT, SIGPIPE

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
cli.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
cli.command(
    "launch-lines",
    epilog=launch_lines.EXAMPLES,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(launch_lines.launch_lines)
train.command("lm", epilog=train_lm.EXAMPLES)(train_lm.train_lm)
train.command("mnist", epilog=train_mnist.EXAMPLES)(train_mnist.train_mnist)
train.command("imagenet", epilog=train_imagenet.EXAMPLES)(train_imagenet.train_imagenet)
train.command("vit", epilog=train_vit.EXAMPLES)(train_vit.train_vit)
cli.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
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
    """Run the command line: a mistake of its user is one line on stderr and exit code 2.

    Exit code 130: stopped by Ctrl-C. 141: whoever read what it prints has gone, as in ``| head``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file may be what no text can hold; it is shown nevertheless.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli(standalone_mode=False)
        print(end="", flush=True)  # now, while it can be told
    except UserError as error:
        _end(str(error), error.exit_code)
    except UsageError as error:
        _end(describe(error, sys.argv[1:]), 2)
    except KeyboardInterrupt:
        code = _STOPPED
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        if error.filename is None:
            raise  # of no file that the command line could have named
        _end(f"{error.filename}: {error.strerror}", 2)
    except SystemExit as ended:
        # Typer and rich make it of a pipe that nobody reads, with an exit code that means an error.
        if isinstance(ended.__context__, BrokenPipeError):
            _end_unread()
        raise
    if code == _STOPPED:  # typer makes it of KeyboardInterrupt, and says nothing
        _end("stopped", _STOPPED)
    sys.exit(code if isinstance(code, int) else 0)


def _end(message: str, code: int) -> NoReturn:
    line = printable(" ".join(message.split()))
    if len(line) > _LONGEST:  # of what was typed; the end says what to do
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def _end_unread() -> NoReturn:
    # What is still in the buffer goes nowhere, without a complaint at the end of the process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_UNREAD)
