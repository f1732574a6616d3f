"""A headless Chromium, spoken to through two pipes, for tests that open our pages.

``--remote-debugging-pipe`` takes messages of the Chrome DevTools Protocol on file descriptor 3 and
answers on 4, each ended by a zero byte. So no port is opened, and no package is needed.

Source: https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0  # for one answer: the machine may be busy


def find() -> str | None:
    """Return the path of a Chromium; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
    ) -> None:
        """Open a page and wait until it is loaded and drawn."""
        self._events.clear()
        mobile = width < 600
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        self._ask("Emulation.setEmulatedMedia", features=[scheme_feature])
        self._ask("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")
        self.drawn()

    def drawn(self) -> None:
        """Wait until two frames have been drawn: charts are drawn in the one after a change."""
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.run(frame)

    def run(self, script: str) -> Any:
        """Return the value of an expression, or what it promises.

        Raises:
            AssertionError: it raised.
        """
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def run_in_frame(self, script: str) -> Any:
        """Return the value of an expression in the sandboxed frame, run as if a user had clicked.

        Raises:
            AssertionError: it raised.
        """
        [frame] = (each for each in self._targets() if each["url"].startswith("about:srcdoc"))
        own, self._session = self._session, None
        try:
            attached = self._ask("Target.attachToTarget", targetId=frame["targetId"], flatten=True)
            self._session = attached["sessionId"]
            answer = self._ask(
                "Runtime.evaluate",
                expression=script,
                awaitPromise=True,
                returnByValue=True,
                userGesture=True,
            )
        finally:
            self._session = own
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def opened(self, url: str) -> bool:
        """Return whether a tab with an address has been opened."""
        return any(each["type"] == "page" and each["url"] == url for each in self._targets())

    def _targets(self) -> list[dict[str, Any]]:
        targets: list[dict[str, Any]] = self._ask("Target.getTargets")["targetInfos"]
        return targets

    def wait(self, script: str) -> None:
        """Wait until an expression is true.

        Raises:
            AssertionError: it is not, after a while.
        """
        deadline = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.1)

    def errors(self) -> list[str]:
        """Return exceptions and other errors of the console: refused scripts, say."""
        self.run("0")  # events that have happened arrive before its answer
        found = []
        for event in self._events:
            match event:
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    found.append(details.get("exception", {}).get("description") or details["text"])
                case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                    if entry["level"] in ("error", "warning"):
                        found.append(entry["text"])
                case {"method": "Runtime.consoleAPICalled", "params": {"type": kind} as called}:
                    if kind in ("error", "warning", "assert"):
                        found.append(str([each.get("value") for each in called["args"]]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        answer = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _wait_for(self, method: str) -> None:
        while all(event["method"] != method for event in self._events):
            self._note(self._next())

    def _note(self, message: Mapping[str, Any]) -> None:
        if "method" in message:
            self._events.append(dict(message))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            assert ready, f"no answer from the browser within {SECONDS:.0f} s"
            received = os.read(self._answers, 1 << 16)
            assert received, "the browser has ended"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


def _moved(handle: int) -> int:
    """Move a descriptor away from those that the browser expects."""
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(handle)
    return moved


@contextmanager
def browser(path: str) -> Iterator[Tab]:
    """Start a Chromium with one page; it ends with the block."""
    theirs, commands = map(_moved, os.pipe())
    answers, ours = map(_moved, os.pipe())
    # Descriptors 3 and 4 of the browser, set by a shell: a preexec_fn may hang in a process with
    # threads.
    shell = f'exec 3<&{theirs} 4>&{ours} {theirs}<&- {ours}>&-; exec "$@"'
    with tempfile.TemporaryDirectory(prefix="shardwise-chromium-") as folder:
        process = subprocess.Popen(
            [
                *("bash", "-c", shell, "bash", path),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
                *("--force-color-profile=srgb", "--hide-scrollbars"),
                *("--remote-debugging-pipe", f"--user-data-dir={folder}"),
            ],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(ours)
        try:
            yield Tab(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.2)  # its children let go of the folder
