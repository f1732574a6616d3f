"""Documents and a tokenizer of the Hugging Face hub, from a server on this host that speaks as it.

The packages that talk to the hub read its address when they are imported: so everything here runs
in programs of its own.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.runs.metrics_file import read_metrics
from tests.programs import shell_environment, start_program
from tests.recipes.corpora import texts, write_hub_folder, write_jsonl, write_tokenizer
from tests.recipes.hub import Hub
from tests.recipes.small import write_model

WAIT = 200.0  # seconds that anything may take on a busy machine

TRAIN = (  # noqa: SIM905 (as one types it)
    "train lm --data hf:local/tiny:en --tokenizer local/tok --model config.json --seq-length 16 "
    "--steps 8 --batch-size 2 --batch-tokens 128 --shuffle-buffer 4 --checkpoint-every 4 "
    "--eval-every 0 --sample-tokens 0 --warmup 2 --device cpu"
).split()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


def run(hub: Hub, folder: Path, *arguments: str) -> str:
    """Run Python with this hub; what it printed."""
    env = {**shell_environment("HF_TOKEN"), **hub.environment(folder / "home")}
    program = start_program(list(arguments), folder=folder, env=env)
    out, err = program.communicate(timeout=WAIT)
    assert program.returncode == 0, out + err
    return out


def losses(out: Path) -> dict[int, float]:
    records = read_metrics(out / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_a_run_streams_from_the_hub_and_goes_on_exactly_over_another_world(
    hub: Hub, tmp_path: Path
) -> None:
    write_model(tmp_path, attention_dropout=0.0)
    first = write_hub_folder(tmp_path / "first", texts(320), texts(60, seed=9), files=8)
    hub.push("datasets/local/tiny", first)
    hub.push("models/local/tok", write_tokenizer(tmp_path / "tok"))
    out = run(hub, tmp_path, "-m", "shardwise", *TRAIN, "--nproc", "2", "--out", "whole")
    assert re.search(
        r"^data +hf:local/tiny:en, streamed in 8 streams, dealt out by file, shuffled in buffers "
        r"of 4 documents; 770 tokens for validation; tokenizer local/tok, 10 tokens$",
        out,
        re.MULTILINE,
    ), out
    read = Counter(
        path for method, path, _ in hub.requests if method == "GET" and "-train." in path
    )
    # Each of two ranks looks into the first file for the fields that there are.
    assert read.pop(min(read)) == 2 + 1
    assert list(read.values()) == [1] * 7, "no file, so no document, was read by two ranks"

    # Since then the dataset has changed; the run goes on with what it has begun with.
    second = write_hub_folder(tmp_path / "second", texts(80, seed=5), texts(60, seed=9), files=8)
    hub.push("datasets/local/tiny", second)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000008")
    hub.requests.clear()
    out = run(hub, tmp_path, "-m", "shardwise", *TRAIN, "--resume", "--out", "resumed")
    assert "resume     after step 4 of 8" in out
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert sorted(losses(tmp_path / "whole")) == list(range(1, 9))
    commits = {path.split("/")[5] for _, path, _ in hub.requests if "-train.00007-" in path}
    assert commits == {"0" * 40}


FAULTS = """
import json, sys, time
from shardwise.base.errors import UserError

pauses, sleep = [], time.sleep

def shorter(seconds):
    pauses.append(seconds)
    sleep(min(seconds, 0.01))

time.sleep = shorter

from huggingface_hub.utils import get_session
from shardwise.app.recipes.text import documents
from shardwise.app.recipes.text.documents import StreamSource, find_documents
from shardwise.app.recipes.text.data import Tokenizer

def told(call):
    try:
        return call()
    except UserError as error:
        return f"{error.exit_code}: {error}"

def opened(name):
    return StreamSource(find_documents([name], None))

def read(name):
    source = opened(name)
    return list(source.training_texts(source.part(0, 1)))

found = {name: told(lambda: opened(name).holds_back) for name in sys.argv[1].split()}
found["tokenizer"] = told(lambda: Tokenizer("local/none").size)
found["back"] = read("hf:local/back")
found["waited"] = sum(pauses)
documents.PATIENCE = 0.1
found["gone"] = told(lambda: read("hf:local/gone"))
try:
    get_session().get("http://127.0.0.1:1/")  # where nobody listens
except Exception as error:
    found["refused"] = documents.connection_lost(error)
json.dump(found, sys.stdout)
"""


def test_what_goes_wrong_at_the_hub_is_told_or_waited_for(hub: Hub, tmp_path: Path) -> None:
    # Larger than what is read at a time, which is decompressed from two parts of 5 MiB; the third
    # part is not to be had. Text that hardly compresses.
    draw = random.Random(0)
    long = [f"{i} " + base64.b64encode(draw.randbytes(6000)).decode() for i in range(2500)]
    (tmp_path / "back").mkdir()
    write_jsonl(tmp_path / "back" / "train.jsonl.gz", long)
    write_jsonl(tmp_path / "back" / "validation.jsonl", texts(5))
    shutil.copytree(tmp_path / "back", tmp_path / "gone")
    for name in ("back", "gone"):
        hub.push(f"datasets/local/{name}", tmp_path / name)
    hub.push("datasets/local/gated", tmp_path / "back")
    hub.gated.add("datasets/local/gated")
    # For longer than the hub's own client goes on trying, which is 6 times; and for good.
    hub.cut("back/train.jsonl.gz", 15)
    hub.cut("gone/train.jsonl.gz", 10**9)
    names = ("hf:local/none:en", "hf:local/gated", "hf:local/back:fr")
    (tmp_path / "faults.py").write_text(FAULTS)
    found = json.loads(run(hub, tmp_path, str(tmp_path / "faults.py"), " ".join(names)))
    unknown, gated, configuration = (found[name] for name in names)
    assert "2: --data: hf:local/none:en cannot be opened" in unknown
    assert "'local/none' doesn't exist on the Hub or cannot be accessed" in unknown
    assert (
        "look for a slip in the name; a private or gated dataset needs `hf auth login`" in unknown
    )
    assert "'local/gated' is a gated dataset" in gated
    assert "BuilderConfig 'fr' not found. Available: ['default']" in configuration
    assert "network" not in configuration
    assert "--tokenizer: found local/none, which cannot be loaded" in found["tokenizer"]
    assert found["back"] == long, "every document once, and whole"
    assert found["waited"] > 25, "the hub's own client had given up"
    assert "1: --data: hf:local/gone cannot be read: " in found["gone"], "worth another start"
    assert "peer closed connection" in found["gone"]
    assert found["refused"] is True
