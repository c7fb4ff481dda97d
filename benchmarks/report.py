"""How large a shared report is and how fast it opens, beside nbconvert's export of the same run's executed notebook.

    python benchmarks/report.py [--run FOLDER] [--tokens N] [--episodes N] [--repeats N]

A made-up run is written (or a given one read) of `--episodes` episodes with `--tokens` sampled tokens in all, eight
signals each, drawn at random, which is the worst for compression. The report holds all episodes; the peer is
explore.ipynb executed on the run and exported by nbconvert as one HTML file, which shows one episode. Both are opened
from disk in headless Chromium in turn, `--repeats` times, after one time each that is not counted: the time is from the
navigation to the first frame after the transcript's first token is in the page. The network is off for both. Needs
Playwright and Chromium (CHROMIUM=/path, or on the PATH).
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from explorer import made_up

from workbench.report import build_report
from workbench.runs import RunFolder
from workbench.runs.execute import run_notebook

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# when the selector's first element is there and a frame with it was drawn, in ms since the navigation
WATCH = """
  const look = () => document.querySelector(SELECTOR)
    && (watch.disconnect(), requestAnimationFrame(() => setTimeout(() => { window.opened = performance.now(); })));
  const watch = new MutationObserver(look);
  watch.observe(document, { childList: true, subtree: true });
"""


def exported(run: RunFolder, out: Path) -> Path:
    """The peer: explore.ipynb executed on the run, as nbconvert's HTML."""
    import nbformat
    from nbconvert import HTMLExporter

    executed = run_notebook("explore", {"run": str(run.path)}, out, progress=False)
    page, _ = HTMLExporter().from_notebook_node(nbformat.read(executed.path / "executed.ipynb", 4))
    path = out / "exported.html"
    path.write_text(page, encoding="utf-8")
    return path


def opened(browser, path: Path, selector: str) -> float:
    """Seconds from the navigation to the first frame with the selector's element."""
    context = browser.new_context(viewport={"width": 1360, "height": 940}, offline=True)
    page = context.new_page()
    page.add_init_script(WATCH.replace("SELECTOR", repr(selector)))
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_function("() => window.opened", timeout=120_000)
    seconds = page.evaluate("window.opened") / 1000
    context.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Size and opening time of a report, beside nbconvert's export.")
    parser.add_argument("--run", help="a run folder to read instead of a made-up one")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    browser_path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not browser_path:
        print("no Chromium found (apt install chromium, or set CHROMIUM=/path): nothing is measured", file=sys.stderr)
        return 0
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        out = Path(folder)
        made = (folder, options.tokens, options.episodes, 4)
        run = RunFolder.open(options.run) if options.run else made_up(*made)
        began = time.perf_counter()
        report = build_report(run, episodes=None, out=out / "report.html")
        built = time.perf_counter() - began
        redacted = build_report(run, episodes=None, redact=True, out=out / "redacted.html")
        pages = {
            "report": (report, ".cw-tok"),
            "report, redacted": (redacted, ".cw-tok"),
            "nbconvert": (exported(run, out), "[data-workbench-figure=text] span"),
        }
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        times: dict[str, list[float]] = {name: [] for name in pages}
        for repeat in range(options.repeats + 1):
            for name, (path, selector) in pages.items():
                seconds = opened(browser, path, selector)
                times[name] += [seconds] if repeat else []
        browser.close()
        turns = run.read("turns")
        episodes, tokens = turns.select("step", "episode").n_unique(), turns["token_ids"].list.len().sum()
        print(f"{episodes} episodes, {tokens:,} tokens; built in {built:.1f} s; load {os.getloadavg()[0]:.1f}")
        print(f"{'':18} {'shows':>12} {'MB':>7} {'opens in s':>11} {'slowest':>8}")
        for name, (path, _) in pages.items():
            shows = "1 episode" if name == "nbconvert" else f"{episodes} episodes"
            middle, slow = statistics.median(times[name]), max(times[name])
            print(f"{name:18} {shows:>12} {path.stat().st_size / 1e6:7.2f} {middle:11.2f} {slow:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
