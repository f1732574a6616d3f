"""Try the versions of Python and torch that are supported, each pair in an environment of its own.

    python tests/packaging/matrix.py [--pythons 3.12 3.13] [--torches 2.12] [--python PATH ...]

Takes what interpreters it finds (given, on the PATH, of pyenv, or fetched by uv), says which are
missing, and runs the tests of what depends most on either. Results stay in
``.venv-matrix/results``, so pairs can be tried one at a time; ``docs/torch-compatibility.md``
shows the table of all of them. Run it after a change of what it supports, and before a release.

torch comes from the package index; set ``UV_TORCH_BACKEND=cpu`` for its much smaller CPU builds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-matrix"
RESULTS = FOLDER / "results"
PAGE = ROOT / "docs" / "torch-compatibility.md"
TABLE = re.compile(
    r"(?<=<!-- the table of make matrix -->\n).*?(?=<!-- end of the table -->)", re.S
)

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
# What depends most on either, over at most three ranks. Without ranks that are threads ("fake"):
# torch 2.11 is not made for them.
TESTS = (
    "tests/test_public_api.py",
    "tests/checkpoint/test_api.py",
    "tests/compat/test_patch.py",
    "tests/parity/test_checkpoint_torch.py",
    "tests/parity/test_from_rank_zero.py",
    "tests/parity/test_training.py",
    "-k=not fake and not 4-",
)


def main() -> None:
    """Try the pairs that the command line names, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--torches", nargs="+", default=TORCHES, metavar="X.Y")
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="PATH", help="interpreters to take first"
    )
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    uv = _install_uv()
    for version in arguments.pythons:
        interpreter = _find(version, arguments.python)
        for torch in arguments.torches:
            result = _try(uv, version, interpreter, torch)
            print(f"Python {version}, torch {torch}: {result['summary']}", flush=True)
            path = RESULTS / f"{version}-{torch}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
    table = _table()
    PAGE.write_text(TABLE.sub(lambda _: f"\n{table}\n", PAGE.read_text()))
    print(f"\n{table}\nlogs: {FOLDER}/*.log")


def _install_uv() -> Path:
    """Uv, which makes an environment in seconds, from one cache of what all of them share."""
    home = FOLDER / "uv"
    uv = home / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", "uv"], check=True)
    return uv


def _find(version: str, given: list[str]) -> str | None:
    """The path of an interpreter of that version, if there is one."""
    found = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*given, *([found] if found else [])]
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    print_version = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        # pyenv has a python3.12 on the PATH that only says that it is not chosen.
        asked = subprocess.run([candidate, "-c", print_version], capture_output=True, text=True)
        if asked.stdout.strip() == version:
            return candidate
    return None


def _try(uv: Path, version: str, interpreter: str | None, torch: str) -> dict[str, str]:
    """Make the environment of a pair, and run the tests in it."""
    name = f"{version}-{torch}"
    folder = FOLDER / name
    python = folder / "bin" / "python"
    variables = {**os.environ, "UV_HTTP_TIMEOUT": "300"}
    packages = (f"--editable={ROOT}[train,data,test]", f"torch=={torch}.*")
    steps = (
        ("no interpreter", ("venv", "--clear", "--python", interpreter or version, folder)),
        ("cannot be installed", ("pip", "install", "--python", python, *packages)),
    )
    log = FOLDER / f"{name}.log"
    with log.open("w") as output:
        for failure, command in steps:
            done = subprocess.run(
                (uv, *command, "--quiet"), env=variables, stdout=output, stderr=subprocess.STDOUT
            )
            if done.returncode:
                return {"summary": failure}
    exact = subprocess.run(
        [python, "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)"],
        capture_output=True,
        text=True,
    ).stdout.split()
    with log.open("a") as output:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    shutil.rmtree(folder)
    last = log.read_text().splitlines()[-1]
    summary = re.sub(r" in \d.*|,? \d+ (?:deselected|warnings?)|=", "", last).strip(" ,")
    return {"summary": summary, "python": exact[0], "torch": exact[1]}


def _table() -> str:
    """What all pairs tried so far gave, as a table of the page."""
    rows = ["| Python | " + " | ".join(f"torch {torch}" for torch in TORCHES) + " |"]
    rows.append("| --- " * (len(TORCHES) + 1) + "|")
    for version in PYTHONS:
        cells = []
        for torch in TORCHES:
            path = RESULTS / f"{version}-{torch}.json"
            cells.append(json.loads(path.read_text())["summary"] if path.exists() else "not tried")
        rows.append(f"| {version} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
