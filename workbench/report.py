"""One HTML file that shows a run: readable offline, for ever, by anyone, and safe whatever the run's text holds.

It holds what the run was and found, chosen episodes in the explorer, the notes, the executed notebooks, and those of
the run's curves and signals that no notebook in it draws. What an agent was told and what it wrote is text from
elsewhere: it is data that scripts show as text, or it is escaped (share.py, notebook_html.py). As a second fence the
page's security policy lets only the scripts of this file run (by their hash) and loads nothing from anywhere.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import audit, pages, share
from .errors import WorkbenchError
from .figures.display import MIME as PLOTLY_MIME
from .notebook_html import cell_html, figure_html
from .runs import RunFolder
from .runs.files import atomic_write
from .runs.manifest import artifacts
from .share import Shared, plain_html

FOLD = 4  # lines of a value behind its first, from which on they are folded away
EPISODES = 200  # most episodes that a report takes unless told otherwise
_WEBGL = {"scattergl", "heatmapgl", "splom", "parcoords", "scatter3d", "surface", "mesh3d", "scatterpolargl"}
_STATES = ("complete", "running", "failed", "interrupted")

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #66727f; --line: #dfe4e9; --soft: #f6f8f9; --paper: #fff;
        --blue: #0072b2; --red: #b3261e; --good: #13643f; --good-soft: #e3f1ea; --bad-soft: #fbe9e7; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e3e7eb; --muted: #a0abb6; --line: #343b43; --soft: #20252b; --paper: #16191d;
          --blue: #7cc4f5; --red: #ff9c90; --good: #7fd6a8; --good-soft: #17342a; --bad-soft: #3d211f; }
  .figure, .kept, .output img { background: #fff; color: #1f2933; border-radius: 6px; padding: 8px; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 980px; padding: 40px 32px 80px; color: var(--ink); background: var(--paper);
       font: 16px/1.6 "Inter", "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
h1, h2, h3, h4 { line-height: 1.25; margin: 1.8em 0 .5em; font-weight: 650; }
h1 { font-size: 28px; margin-top: .6em; } h2 { font-size: 21px; } h3 { font-size: 17px; }
a { color: var(--blue); }
code, pre { font-family: "JetBrains Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 13px; }
pre { margin: .6em 0; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
pre.table { white-space: pre; overflow-x: auto; line-height: 1.25; }
header { border-bottom: 1px solid var(--line); padding-bottom: 20px; margin-bottom: 28px; }
header h1 { margin: 0 0 4px; }
.sub { color: var(--muted); margin: 0 0 12px; overflow-wrap: anywhere; font-size: 14px; }
header .sub { margin: 0 0 18px; font-size: 16px; }
#explorer-said { color: var(--red); } #explorer-said:empty { display: none; }
#explorer-view { --wide: min(1480px, 100vw - 64px); width: var(--wide); margin-left: calc(50% - var(--wide) / 2);
                 min-height: clamp(460px, 100vh - 40px, 820px); }
section.explorer { margin-bottom: 40px; }
.note { border-top: 1px solid var(--line); padding: 8px 0; overflow-wrap: anywhere; unicode-bidi: isolate; }
.note pre { font: inherit; font-size: 15px; margin: 2px 0 0; unicode-bidi: isolate; }
.state { display: inline-block; padding: 1px 9px; border-radius: 10px; font-size: 13px; font-weight: 600;
         background: var(--good-soft); color: var(--good); vertical-align: 4px; margin-left: 8px; }
.state.bad { background: var(--bad-soft); color: var(--red); }
.facts { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 36px; }
.facts h2 { margin: 12px 0 4px; font-size: 14px; color: var(--muted); font-weight: 600; }
.facts table, .kept table, .text table { border-collapse: collapse; font-size: 14px; }
.facts table { width: 100%; table-layout: fixed; }
.facts td { padding: 3px 8px 3px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere;
            white-space: pre-line; }
.facts td:first-child { color: var(--muted); width: 42%; }
.kept td, .kept th, .text td, .text th { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: left; }
.text blockquote { margin: 0; padding-left: 16px; border-left: 3px solid var(--line); color: var(--muted); }
.text code { background: var(--soft); padding: 1px 4px; border-radius: 3px; }
details.code { margin: 14px 0 4px; }
details.code > summary { cursor: pointer; color: var(--muted); font: 12px "DejaVu Sans Mono", Consolas, monospace;
                         overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
details.code > pre, .highlight pre { background: var(--soft); padding: 10px 14px; border-radius: 6px; }
.error { background: var(--bad-soft); padding: 10px 14px; border-radius: 6px; }
.stderr { color: var(--muted); }
.part { color: var(--muted); border-top: 1px solid var(--line); margin: 64px 0 0; padding-top: 24px; font-size: 14px; }
.figure { margin: 12px 0; overflow-x: auto; } .figure > div { min-height: 40px; }
.output img { max-width: 100%; }
@media (max-width: 720px) {
  .facts { grid-template-columns: 1fr; } body { padding: 20px 14px; } #explorer-view { width: auto; margin-left: 0; }
}
@media print { details.code { display: none; } body { max-width: none; padding: 0; } }
"""


def build_report(
    run: RunFolder,
    also: Sequence[RunFolder] = (),
    *,
    episodes: int | None = EPISODES,
    redact: bool = False,
    sections: Iterable[str] = (),
    out: str | Path | None = None,
) -> Path:
    """Write a run's report and return its path: report.html in the run folder, or `out`.

    also: runs whose notebooks follow in the same page, such as the analyses of this one. episodes: how many of the
    recorded episodes it holds at most, None for all; see summaries.choose. sections: further parts, each HTML that is
    safe as it is; they and an audit of the run come last. redact: leave out notebooks, audit and all text, and keep
    numbers; it is written to report-redacted.html. Raises WorkbenchError where a run holds neither an executed notebook
    nor recorded episodes, or where a redacted report is to take parts that may hold text.
    """
    sections = list(sections)
    if redact and (also or sections):
        raise WorkbenchError("a redacted report takes no other notebooks and sections: they may hold text")
    if episodes is not None and episodes < 1:
        raise WorkbenchError(f"episodes of a report must be 1 or more, got {episodes}")
    explorable = share.explorable(run)
    if redact and not explorable:
        raise WorkbenchError(f"{run.path} holds no recorded episodes, so a redacted report has nothing to show")
    if redact:
        parts = [(None, _numbers(run.manifest), run.path.name)]
    else:
        bare = explorable and not (run.path / "executed.ipynb").is_file()
        parts = [(None if bare else _executed(run), run.manifest, run.path.name)]
        parts += [(_executed(other), other.manifest, other.path.name) for other in also]
    if explorable and not redact:
        sections.append(audit.section(audit.audit(run, name=run.path.name)))
    text = page(
        *parts,
        shared=share.gather(run, episodes, redact) if explorable else None,
        sections=sections,
        figures=_drawn_anew(run, parts, redact) if explorable else (),
    )
    report = Path(out) if out else run.path / ("report-redacted.html" if redact else "report.html")
    atomic_write(report, text.encode("utf-8", errors="replace"))
    if run.is_complete and report.resolve().is_relative_to(run.path):
        run.update_manifest(artifacts=artifacts(run.path))
    return report


def _executed(run: RunFolder) -> Any:
    import nbformat

    path = run.path / "executed.ipynb"
    if not path.is_file():
        raise WorkbenchError(f"{run.path} holds no executed.ipynb, so there is nothing to report")
    try:
        return nbformat.read(path, as_version=4)
    except ValueError as error:
        raise WorkbenchError(f"{path} cannot be read as a notebook: {error}") from None


def _drawn_anew(run: RunFolder, parts: Iterable[tuple[Any, Any, str]], redact: bool) -> list[tuple[str, list[dict]]]:
    """(title, figures as plotly JSON) of the run's curves and signals, without those that a notebook here draws."""
    from .figures import overview
    from .figures.display import spec

    drawn = {_title(figure) for notebook, *_ in parts if notebook for figure in _figures(notebook)}
    found = overview.tables(run)
    views = overview.views({name: share.redacted(t) for name, t in found.items()} if redact else found)
    rest = [(view.title, [f for f in map(spec, view.figures) if _title(f) not in drawn]) for view in views]
    return [(title, figures) for title, figures in rest if figures]


def _title(figure: Mapping[str, Any]) -> str | None:
    meta = figure.get("layout", {}).get("meta")
    return meta.get("title") if isinstance(meta, dict) else None


def page(
    *parts: tuple[Any, Mapping[str, Any], str],
    shared: Shared | None = None,
    sections: Iterable[str] = (),
    figures: Iterable[tuple[str, Sequence[Mapping[str, Any]]]] = (),
) -> str:
    """The whole page, as one string.

    parts: a notebook or None, the manifest of its run and the name of its folder; shared: the episodes to explore;
    figures: titles, each with figures as plotly JSON, that follow the notebooks; sections: HTML that is safe, at last.
    """
    (notebook, manifest, name), figures = parts[0], list(figures)
    body = [_header(manifest, name)]
    body += [share.section(shared), share.notes_section(shared)] if shared else []
    body += [cell_html(cell) for cell in notebook.cells] if notebook else []
    for other, facts, folder in parts[1:]:
        body += [_section(facts, folder), *(cell_html(cell) for cell in other.cells)]
    for title, drawn in figures:
        body += [f"<h2>{plain_html(title)}</h2>", *map(figure_html, drawn)]
    body += sections
    embedded = [figure for other, *_ in parts if other for figure in _figures(other)]
    embedded += [figure for _, drawn in figures for figure in drawn]
    return _document(f"{manifest.get('experiment', 'run')} {name}", "\n".join(body), bool(shared), embedded)


def _document(title: str, body: str, explorer: bool, figures: Sequence[Mapping[str, Any]]) -> str:
    """The document around a body: its styles, its scripts, and the policy under which only these run."""
    from plotly.offline import get_plotlyjs
    from pygments.formatters import HtmlFormatter

    library = get_plotlyjs() if figures else ""
    modules = [pages.module(name) for name, wanted in (("static_figures", figures), ("static", explorer)) if wanted]
    if any("</script" in text.lower() or "<!--" in text for text in modules):
        raise WorkbenchError("a module of the widgets holds text that ends a script, so no page can hold it")
    allowed = [_hash(text) for text in (*modules, library) if text]
    if any(str(trace.get("type")) in _WEBGL for figure in figures for trace in figure.get("data", [])):
        allowed.append("'unsafe-eval'")  # plotly compiles their shader programs
    policy = (
        f"default-src 'none'; script-src {' '.join(allowed) or chr(39) + 'none' + chr(39)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    styles = f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}{_STYLE}"
    styles += pages.stylesheet("explorer") if explorer else ""
    scripts = [f'<script type="module">{text}</script>' for text in modules]
    if library:
        packed = base64.b64encode(gzip.compress(library.encode(), 9, mtime=0)).decode()
        scripts.insert(0, f'<script type="application/octet-stream" id="plotly">{packed}</script>')
    after = "\n".join(scripts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{plain_html(title)}</title>\n'
        f"<style>{styles}</style>\n</head>\n<body>\n{body}\n{after}\n</body>\n</html>\n"
    )


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _figures(notebook: Any) -> Iterable[Mapping[str, Any]]:
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if PLOTLY_MIME in output.get("data", {}):
                yield output.data[PLOTLY_MIME]


def _numbers(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Of a manifest what holds no text but the workbench's own: state, times, the method and numeric parameters."""
    from .methods import METHODS
    from .settings import TrainConfig

    shapes = {"experiment": r"[A-Za-z0-9._-]+", "digest": r"[0-9a-f]+", "started": r"[0-9T:.+Z-]+"}
    kept = {n: manifest[n] for n, shape in shapes.items() if re.fullmatch(shape, str(manifest.get(n, "")))}
    kept["status"] = next((s for s in _STATES if s == manifest.get("status")), "unknown")
    kept["seconds"] = manifest["seconds"] if isinstance(manifest.get("seconds"), int | float) else None
    given, known = manifest.get("parameters") or {}, {field.name for field in fields(TrainConfig)}
    kept["parameters"] = {"method": given["method"]} if given.get("method") in METHODS else {}
    kept["parameters"] |= {n: v for n, v in given.items() if n in known and isinstance(v, int | float)}
    return kept


def _section(manifest: Mapping[str, Any], name: str) -> str:
    origin = plain_html(f"{manifest.get('notebook') or manifest.get('experiment', 'run')} · {name}")
    changed = f'<div class="facts"><div>{_table(manifest["parameters"])}</div></div>'
    return f'<p class="part">{origin}</p>' + (changed if manifest.get("parameters") else "")


def _header(manifest: Mapping[str, Any], name: str) -> str:
    status = str(manifest.get("status", "unknown"))
    git, versions = manifest.get("git"), manifest.get("versions") or {}
    started = str(manifest.get("started") or "")[:19].replace("T", " ")
    commit = git and git["commit"][:12] + (" with uncommitted changes" if git["dirty"] else "")
    facts = {
        "notebook": manifest.get("notebook"),
        "started": started and f"{started} UTC",
        "duration": _duration(manifest.get("seconds")),
        "attempts": len(manifest.get("attempts") or []) or None,
        "device": manifest.get("device"),
        "commit": commit or ("none (outside a checkout)" if "git" in manifest else None),
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items() if version),
        "digest": manifest.get("digest"),
    }
    facts = {name: value for name, value in facts.items() if value not in (None, "")}
    error = manifest.get("error")
    found = manifest.get("result") or {}
    found = {name: found[name] for name in ("verdict", *found) if name in found}  # what was found, before its numbers
    columns = (("Result", found), ("Run", facts)), (("Parameters", manifest.get("parameters")),)
    tables = "".join(
        "<div>" + "".join(f"<h2>{title}</h2>{_table(rows)}" for title, rows in column if rows) + "</div>"
        for column in columns
    )
    return (
        f"<header><h1>{plain_html(str(manifest.get('experiment', 'run')))}"
        f'<span class="state{"" if status == "complete" else " bad"}">{plain_html(status)}</span></h1>'
        f'<p class="sub">{plain_html(name)}</p>'
        + (f'<pre class="error">{plain_html(str(error))}</pre>' if error else "")
        + f'<div class="facts">{tables}</div></header>\n'
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(float(seconds), 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def _table(rows: Mapping[str, Any]) -> str:
    cells = ((plain_html(str(name)), _folded(_shown(value))) for name, value in rows.items())
    return "<table>" + "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in cells) + "</table>"


def _folded(text: str) -> str:
    """HTML of a value: all of it, or where it has many lines its first and the others on a click."""
    first, _, rest = text.partition("\n")
    more = rest.count("\n") + 1
    if more < FOLD:
        return plain_html(text)
    return f"<details><summary>{plain_html(first)} <i>and {more} more</i></summary>{plain_html(rest)}</details>"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict) and value:
        return "\n".join(f"{name}  {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list) and value and not any(isinstance(inner, dict | list) for inner in value):
        sentences = any(isinstance(inner, str) and inner.endswith(".") for inner in value)
        return ("\n" if sentences else ", ").join(map(_shown, value))
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return "–" if value is None else str(value)
