"""The command ``shardwise``: its commands, and how a mistake on a command line ends."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from shardwise import __version__
from shardwise.app.cli.options import UsageError, describe, help_if_alone
from shardwise.base.errors import StoreError, UserError
from shardwise.base.units import printable
from shardwise.insight.schema.words import own_option

_LONGEST = 2000  # characters of a message
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STOPPED, _UNREAD = 130, 141  # 128 and the signal, as shells count: SIGINT, SIGPIPE

#: The file of each command, in the order of ``--help``.
_FILES = {
    "train": "train",
    "run": "run",
    "checkpoint": "checkpoint",
    "merge-lora": "checkpoint",
    "generate": "generate",
    "inspect": "inspect",
    "calibrate": "plan",
    "plan": "plan",
    "prove": "prove",
    "watch": "watch",
    "compare": "watch",
    "doctor": "hosts",
    "launch-lines": "hosts",
}


class _TopLevel(TyperGroup):
    """The commands in our order: typer puts those with commands of their own behind all others."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return their names."""
        return [name for name in _FILES if name in self.commands]


def commands(words: Sequence[str]) -> typer.Typer:
    """Return the commands: all of them, or those of one file if a command line begins with one.

    Options take time to make: a command does not wait for those of others.
    """
    named = [_FILES[word] for word in words[:1] if word in _FILES]
    cli = typer.Typer(
        name="shardwise",
        cls=_TopLevel,
        help="Fully sharded data parallel training that you can see into.",
        invoke_without_command=True,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": own_option,
        },
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        # Its options stand in front of a command, and bring pydantic along, which takes a moment.
        add_completion=not named,
    )
    cli.callback()(_root)
    for file in dict.fromkeys(named or _FILES.values()):
        import_module(f"shardwise.app.cli.{file}").add_to(cli, *words[1:])
    return cli


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version
    help_if_alone(context)


def app() -> NoReturn:
    """Run the command line: a mistake of its user is one line on stderr and exit code 2.

    Exit code 130: stopped by Ctrl-C. 141: the reader of its output has gone, as in ``| head``.
    1: what it prints cannot be written, since the disk is full or standard output is closed.
    """
    _check_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The name of a file may be what no text can hold; it is shown nevertheless.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = commands(sys.argv[1:])(standalone_mode=False)
        print(end="", flush=True)  # now, while an error can be reported
    except UserError as error:
        _end(str(error), error.exit_code)
    except StoreError as error:
        _end(str(error), 1)
    except UsageError as error:
        _end(describe(error), 2)
    except KeyboardInterrupt:
        code = _STOPPED
    except BrokenPipeError:
        _end_unread()
    except OSError as error:
        if error.errno in _FULL:
            _end(f"cannot write: {error.strerror}", 1)
        if error.filename is None:
            raise  # about no file that the command line could have named
        _end(f"{error.filename}: {error.strerror}", 2)
    except SystemExit as ended:
        # Typer and rich raise it for a pipe without a reader, with the exit code of an error.
        if isinstance(ended.__context__, BrokenPipeError):
            _end_unread()
        raise
    if code == _STOPPED:  # what typer makes of KeyboardInterrupt, without a word
        _end("stopped", _STOPPED)
    sys.exit(code if isinstance(code, int) else 0)


def _check_streams() -> None:
    """Give closed streams to the null device, else a checkpoint could get the number of stderr.

    Without a standard output that can be written to, every command ends, as coreutils do.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    reads_only = fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if sys.stdout is None or reads_only:
        _end("cannot write: standard output is closed; >/dev/null discards what is printed", 1)


def _end(message: str, code: int) -> NoReturn:
    line = printable(" ".join(message.split()))
    if len(line) > _LONGEST:  # of what was typed; the end says what to do
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def _end_unread() -> NoReturn:
    # What is still in the buffer is dropped, without a complaint when the process ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_UNREAD)
