"""Build the wheel, install it into an empty environment, and use it there as a user would.

    python tests/packaging/wheel.py             with the versions that the project pins
    python tests/packaging/wheel.py --newest    with what users get from pip today

Run by ``make wheel`` and ``.ci/run``, not by pytest: it takes a minute. Needs mypy beside the
Python that runs it; everything else comes from the package index, or from pip's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
_T = TypeVar("_T")
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


class Environment:
    """An environment that holds the wheel and its dependencies, in a folder away from the clone.

    Args:
        folder: where to make it.
        versions: what pip is told about versions.
    """

    def __init__(self, folder: Path, versions: Sequence[str]) -> None:
        self._versions = versions
        self.bin = folder / "env" / "bin"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        # Nothing of the environment that this script runs in.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._variables = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        run(sys.executable, "-m", "venv", str(folder / "env"))

    def install(self, *requirements: str) -> None:
        """Install packages. Compiled files are made when needed."""
        how = (*self._versions, "--no-compile")
        run(str(self.bin / "python"), *PIP, "install", *how, *requirements)

    def run(self, *command: str, code: int = 0, variables: Mapping[str, str] | None = None) -> str:
        """Run a command of the environment, elsewhere. Returns what it printed."""
        return run(
            str(self.bin / command[0]),
            *command[1:],
            code=code,
            cwd=self.elsewhere,
            env={**self._variables, **(variables or {})},
        )

    def python(self, code: str) -> str:
        """Run Python code. Returns what it printed."""
        return self.run("python", "-W", "error", "-c", code)


def run(*command: str, code: int = 0, **options: Any) -> str:
    """Run a command. Returns what it printed, on both streams.

    Raises:
        SystemExit: it ended with another exit status than ``code``.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode != code:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def expect(found: str, *expected: str) -> None:
    """Check that a command printed something.

    Raises:
        SystemExit: it did not.
    """
    for part in expected:
        if part not in found:
            sys.exit(f"expected {part!r}, found:\n{found}")


def build(folder: Path) -> Path:
    """Build the wheel from the clone."""
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    ours = (
        "shardwise/py.typed",
        "shardwise/runs/page.js",
        "shardwise/runs/uplot/uPlot.iife.min.js",
    )
    expect("\n".join(names), *ours, "licenses/src/shardwise/runs/uplot/LICENSE")
    outside = [name for name in names if not name.startswith(("shardwise/", "shardwise-"))]
    if outside:
        sys.exit(f"the wheel would install more than the package: {outside}")
    return wheel


def check_names(env: Environment) -> None:
    """The version, and every public name after ``import shardwise`` alone."""
    version = env.python("import shardwise; print(shardwise.__version__)").strip()
    expect(env.run("shardwise", "--version"), f"shardwise {version}\n")
    expect(env.run("python", "-m", "shardwise", "--version"), f"shardwise {version}\n")
    expect(
        env.python(
            "import shardwise, importlib.metadata\n"
            "assert importlib.metadata.version('shardwise') == shardwise.__version__\n"
            "assert shardwise.checkpoint.latest('runs/lm') is None\n"
            "for package in (shardwise, shardwise.checkpoint, shardwise.diloco, shardwise.optim):\n"
            "    for name in package.__all__:\n"
            "        getattr(package, name)\n"
            "print(shardwise.__file__)"
        ),
        str(env.bin.parent),
    )


def check_missing_extra(env: Environment) -> None:
    """A training without what it needs is one line that tells what to type."""
    said = env.run("shardwise", "train", "lm", "--nproc", "2", code=2)
    expect(said, "error: training needs ", f"{env.bin / 'python'} -m pip install transformers")
    if said.count("\n") != 1:
        sys.exit(f"expected one line, found:\n{said}")


def check_completion(env: Environment) -> None:
    """Shells can complete commands and options."""
    line = str(env.bin / "shardwise")
    shown = run(
        "bash",
        "-c",
        f"{line} --show-completion bash; exit $?",
        env={**os.environ, "SHELL": "/bin/bash"},
    )
    expect(shown, "complete", "shardwise")
    completed = env.run(
        "shardwise",
        variables={
            "_SHARDWISE_COMPLETE": "complete_bash",
            "COMP_WORDS": "shardwise tr",
            "COMP_CWORD": "1",
        },
    )
    expect(completed, "train")


def check_types(env: Environment) -> None:
    """A program that uses the library passes ``mypy --strict``, and a wrong one does not."""
    mypy = (
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(env.bin / "python"),
    )
    cache = ("--cache-dir", str(ROOT / ".mypy_cache" / "wheel"))
    run(*mypy, *cache, str(HERE / "typed.py"), cwd=env.elsewhere)
    wrong = env.elsewhere / "wrong.py"
    wrong.write_text("from shardwise import checkpoint, fully_shrd\ncheckpoint.steps(3)\n")
    said = run(*mypy, *cache, str(wrong), code=1, cwd=env.elsewhere)
    expect(said, 'has no attribute "fully_shrd"', 'incompatible type "int"')


def check_program(env: Environment) -> None:
    """The typed program runs, under ``torchrun``, over two ranks."""
    program = str(HERE / "typed.py")
    expect(env.run("torchrun", "--standalone", "--nproc-per-node", "2", program), "trained\n")


def check_training(env: Environment) -> None:
    """With the extra, the training that the README begins with starts, trains and ends."""
    said = env.run(
        "shardwise", "train", "lm", "--nproc", "2", "--steps", "3", "--sample-tokens", "8"
    )
    expect(said, "step=3 ")


def main() -> None:
    """Build, install, try; say how long each took."""
    pinned = ("--constraint", str(ROOT / "constraints.txt"))
    versions = () if "--newest" in sys.argv else pinned
    with tempfile.TemporaryDirectory(prefix="shardwise-wheel-") as name:
        folder = Path(name)
        wheel = timed("build the wheel", lambda: build(folder))
        env = timed("make an environment", lambda: Environment(folder, versions))
        timed("install the wheel", lambda: env.install(str(wheel)))
        timed("version and names", lambda: check_names(env))
        timed("a missing extra", lambda: check_missing_extra(env))
        timed("shell completion", lambda: check_completion(env))
        timed("types", lambda: check_types(env))
        timed("a program", lambda: check_program(env))
        timed("install its extra", lambda: env.install(f"{wheel}[train]"))
        timed("a training", lambda: check_training(env))
        print(env.python("import torch; print('wheel: torch', torch.__version__)"), end="")


def timed(what: str, do: Callable[[], _T]) -> _T:
    """Do something, and print how long it took."""
    print(f"wheel: {what} ", end="", flush=True)
    start = time.monotonic()
    result = do()
    print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return result


if __name__ == "__main__":
    main()
