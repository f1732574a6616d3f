# Sourced by the findings: what they run in, and how.
#
#   packages NAME==VERSION ...   installs these into a temporary folder, with pip, and removes it at exit;
#                                with PYTHON=... uses that interpreter instead, and checks the versions
#   ranks COUNT                  runs the program on standard input on so many processes, over gloo
#
# A program raises an error where it finds another behavior than the one it describes, so that the script
# exits with another code than 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

packages() {
  python=${PYTHON:-}
  if [ -z "$python" ]; then
    python3 -m venv "$folder/venv"
    python=$folder/venv/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
  fi
  "$python" - "$@" <<'PROGRAM'
import sys
from importlib.metadata import version

for wanted in sys.argv[1:]:
    name, _, number = wanted.partition("==")
    found = version(name).partition("+")[0]
    if found != number:
        sys.exit(f"{name}: found {found}, expected {number}")
    print(name, version(name))
PROGRAM
}

ranks() {
  cat >"$folder/program.py"
  PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone \
    --nproc-per-node "$1" "$folder/program.py"
}
