"""A real JupyterLab and kernel, driven in headless Chromium; screenshots go to BROWSER_ARTIFACTS or to pytest's tmp.

A browser is looked for at CHROMIUM, then on the PATH, then among Playwright's own. Where there is none the tests are
skipped with one line, and fail where CI is set.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

TOKEN = "browser-tests"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
NEEDED = "no browser found: `apt install chromium` or `.venv/bin/playwright install chromium`, or set CHROMIUM=/path"


def _missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> Path:
    """Where screenshots are kept."""
    folder = os.environ.get("BROWSER_ARTIFACTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("artifacts")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser's path."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed; it is one of the test requirements")
    named = os.environ.get("CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        with sync_playwright() as playwright:
            found = playwright.chromium.executable_path
    if not Path(found).is_file():
        _missing(NEEDED)
    return Path(found)


@pytest.fixture(scope="module")
def browser(chromium) -> Iterator:
    """The browser, closed with its module: Playwright's event loop must be gone when a test starts one of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


class Lab:
    """A JupyterLab server over one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        own = {f"JUPYTER_{n}_DIR": str(folder / ".jupyter" / n.lower()) for n in ("CONFIG", "RUNTIME", "DATA")}
        own |= {f"JUPYTERLAB_{n}_DIR": str(folder / ".lab" / n.lower()) for n in ("SETTINGS", "WORKSPACES")}
        options = {
            "ServerApp.port": self.port,
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.root_dir": folder,
            "IdentityProvider.token": TOKEN,
            "LabApp.expose_app_in_browser": True,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        }
        quiet = folder / ".lab" / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        quiet.parent.mkdir(parents=True)
        quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        self.log = open(folder / "jupyter.log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=os.environ | own | {"OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self._wait()

    def _wait(self, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api?token={TOKEN}", timeout=2):
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.3)
        self.stop()
        pytest.fail(f"JupyterLab did not start:\n{(self.folder / 'jupyter.log').read_text()[-2000:]}", pytrace=False)

    def write(self, name: str, *cells: str) -> None:
        notebook = new_notebook(cells=[new_code_cell(c) for c in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={TOKEN}&reset"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@pytest.fixture(scope="session")
def lab(chromium, tmp_path_factory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.stop()
