"""Pages of runs in a real browser: no error on the console, and every chart has a curve.

Skipped where there is no Chromium; ``.ci/run`` installs one if it can.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from shardwise.insight.inspect.page import page as inspect_page
from shardwise.runs.page import Updates, page
from shardwise.runs.serve import Server
from shardwise.runs.snapshot import RunReader
from tests import chromium
from tests.inspect.plans import planned_report
from tests.runs import folders
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="needs a Chromium")

# By chart: the number of its pixels that have the color of a curve, and not of the grid.
DRAWN = """Object.fromEntries([...document.querySelectorAll(".chart")].map(chart => {
  const canvas = chart.querySelector("canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let colored = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const [red, green, blue, alpha] = pixels.slice(i, i + 4);
    if (alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) colored += 1;
  }
  return [chart.dataset.name, colored];
}))"""


# True as soon as the first page inside of the page is loaded.
FRAMED = (
    "new Promise(done => { const page = document.querySelector('#frames details');"
    "new MutationObserver(() => page.querySelector('iframe').onload = () => done(true))"
    ".observe(page, {childList: true}); page.open = true; })"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    path = chromium.find()
    assert path is not None
    with chromium.browser(path) as opened:
        yield opened


def written(folder: Path, *roots: Path) -> str:
    """Write a page of runs; return its address."""
    file = folder / "page.html"
    runs = [RunReader(root).read() for root in roots]
    file.write_text(page("runs", runs, Updates.NEVER))
    return file.as_uri()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_page_has_curves_no_errors_and_asks_for_nothing(
    tab: chromium.Tab, tmp_path: Path, width: int, scheme: str
) -> None:
    address = written(tmp_path, folders.make(tmp_path / "lm"))
    tab.open(address, width=width, scheme="dark" if scheme == "dark" else "light")
    drawn = tab.run(DRAWN)
    assert list(drawn) == ["loss", "lr", "grad_norm", "tokens_per_s", "memory_mib"]
    assert all(colored > 100 for colored in drawn.values()), drawn
    assert tab.run("document.documentElement.scrollWidth") <= width, "wider than the screen"
    assert tab.errors() == []
    assert tab.requests() == [address]


def test_charts_that_were_drawn_while_hidden_fill_their_cards(
    tab: chromium.Tab, tmp_path: Path
) -> None:
    address = written(tmp_path, folders.make(tmp_path / "lm"))
    file = tmp_path / "page.html"
    file.write_text(file.read_text().replace("<body", '<body style="display:none"', 1))
    tab.open(address, width=1280)
    tab.run("document.body.style.display = 'block'")
    widths = """[...document.querySelectorAll(".uplot")].map(
        plot => [plot.clientWidth, plot.parentElement.clientWidth])"""
    wait_until(lambda: all(plot == box for plot, box in tab.run(widths)))
    assert all(box > 300 for _, box in tab.run(widths))


@pytest.mark.parametrize(("age", "state"), [(30, "running"), (3600, "stopped without an end")])
def test_a_page_that_was_not_written_again_says_that_the_training_has_stopped(
    tab: chromium.Tab, tmp_path: Path, age: float, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folders.make(tmp_path / "lm", sessions=[folders.session(status="running")])
    then = time.time() - age
    monkeypatch.setattr("shardwise.runs.page.time.time", lambda: then)
    file = tmp_path / "report.html"
    file.write_text(page("lm", [RunReader(root).read()], Updates.RELOAD, every=10.0))
    tab.open(file.as_uri())
    assert tab.run("document.querySelector('.state').textContent") == state
    assert tab.errors() == []


def test_an_empty_chart_would_be_noticed(tab: chromium.Tab, tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm")
    (root / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": None, "lr": 1.0}) + "\n")
    tab.open(written(tmp_path, root))
    assert tab.run(DRAWN)["lr"] < 100


def test_nan_is_shown_and_is_never_the_best(tab: chromium.Tab, tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", steps=3)
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": None, "validation_loss": None}) + "\n")
    tab.open(written(tmp_path, root))
    assert tab.run("document.querySelector('.tile b').textContent") == "not finite"
    problems = tab.run("document.getElementById('problems').innerText")
    assert "NaN or infinite" in problems
    assert "loss in 1 step, first in step 4" in problems
    assert tab.errors() == []


def test_what_a_run_says_stays_text(tab: chromium.Tab, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)><script>document.title='taken'</script>"
    session = folders.session(command=hostile, status="failed", error=hostile, mesh={hostile: 1})
    root = folders.make(
        tmp_path / "<img src=x onerror=alert(1)>",
        model={"name": hostile},
        config={hostile: hostile, "__proto__": "x", "constructor": {"a": 1}},
        sessions=[session],
    )
    (root / "sample.txt").write_text(hostile)
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 201, hostile: 1.0, "__proto__": 2.0}) + "\n")
    tab.open(written(tmp_path, root))
    assert tab.run("document.title") == "runs"
    assert tab.run("document.images.length") == 0
    assert hostile in tab.run("document.body.innerText")
    assert tab.errors() == []


def test_no_text_turns_around_what_follows_it(tab: chromium.Tab, tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", model={"name": "turned\u202earound"})
    tab.open(written(tmp_path, root))
    assert "turned\ufffdaround" in tab.run("document.body.innerText")


def test_an_empty_folder_and_a_damaged_run_have_a_page(tab: chromium.Tab, tmp_path: Path) -> None:
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.mkdir()
    folders.make(odd, sessions=[{"mesh": 3, "host": "x", "status": 7, "started": {}, "error": [1]}])
    (odd / "plan.json").write_text('{"ranks": [null, {"peak": "x"}]}')
    (odd / "metrics.jsonl").write_text('{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n{')
    for root in (empty, odd):
        tab.open(written(tmp_path, root))
        assert tab.run("document.querySelector('h1').textContent") == root.name
        assert tab.errors() == []


def test_an_open_page_follows_its_server(tab: chromium.Tab, tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", steps=3)
    server = Server([root], "lm")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        tab.open(server.url)
        assert tab.run("document.querySelector('.tile b').textContent") == "5.795"
        with (root / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "loss": 0.5, "accuracy": 0.25}) + "\n")
        tab.wait("document.querySelector('.tile b').textContent === '0.5'")
        tab.wait("document.querySelector('.chart[data-name=accuracy] canvas') !== null")
        assert tab.errors() == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_several_runs_share_charts_and_show_what_differs(tab: chromium.Tab, tmp_path: Path) -> None:
    roots = [folders.make(tmp_path / name, config={"lr": name}) for name in ("one", "other")]
    tab.open(written(tmp_path, *roots), width=390)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert all(colored > 100 for colored in tab.run(DRAWN).values())
    assert "1 of 1 settings differ" in tab.run("document.getElementById('config').innerText")
    assert tab.errors() == []


def test_a_page_inside_of_the_page_can_neither_run_a_script_of_its_own_nor_load(
    tab: chromium.Tab, tmp_path: Path
) -> None:
    root = folders.make(tmp_path / "lm")
    (root / "layout.html").write_text(
        "<script>parent.postMessage('taken', '*')</script><img src='http://127.0.0.1:9/x'>"
    )
    address = written(tmp_path, root)
    tab.open(address)
    tab.run("window.heard = []; addEventListener('message', event => heard.push(event.data))")
    assert tab.run(FRAMED)
    assert tab.run("heard") == []
    assert tab.requests() == [address]


def test_links_of_a_page_inside_of_the_page_lead_to_its_parts_and_to_new_tabs(
    tab: chromium.Tab, tmp_path: Path
) -> None:
    root, elsewhere = folders.make(tmp_path / "lm"), "http://127.0.0.1:9/elsewhere"
    layout = inspect_page(planned_report("dp=2", lambda: nn.Linear(4, 4)))
    link = f'<a class="away" href="{elsewhere}" target="_blank">elsewhere</a></body>'
    (root / "layout.html").write_text(layout.replace("</body>", link))
    tab.open(written(tmp_path, root))
    assert tab.run(FRAMED)
    shown = (
        "new Promise(done => { addEventListener('hashchange', () => "
        "done(document.querySelector('.title.shown').id));"
        "document.querySelector('nav a[href$=bias]').click(); })"
    )
    assert tab.run_in_frame(shown) == "bias"
    tab.run_in_frame(
        "document.querySelector('section.shown .c').dispatchEvent("
        "new MouseEvent('click', {bubbles: true}))"
    )
    assert tab.run_in_frame("location.hash") == "#bias@0"
    tab.run_in_frame("document.querySelector('a.away').click()")
    wait_until(lambda: tab.opened(elsewhere))
    assert tab.errors() == []
