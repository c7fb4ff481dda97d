"""What an audit found: as data, as a table, as plain text and as HTML."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from ..errors import printable
from .checks import CHECKS, CORRUPTS, WORTH_KNOWING, Check
from .tally import Example, Tally

_LONGEST = 240  # characters of a source's text that are shown


@dataclass(frozen=True)
class Finding:
    """One check's result, counted in its unit; looked is 0 where the source lacks what the check needs."""

    check: Check
    count: int
    looked: int
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True)
class Report:
    """findings: one a check, in the order of CHECKS, silent ones too. notes: what to know of the audit itself."""

    source: str
    episodes: int
    turns: int
    groups: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, tally: Tally, episodes: int, turns: int, groups: int, notes: Sequence[str]) -> "Report":
        findings = (
            Finding(check, tally.found[name], tally.looked[name], tuple(tally.examples.get(name, ())))
            for name, check in CHECKS.items()
        )
        return cls(source, episodes, turns, groups, tuple(findings), tuple(notes))

    def __getitem__(self, name: str) -> Finding:
        return next(finding for finding in self.findings if finding.check.name == name)

    @property
    def found(self) -> tuple[Finding, ...]:
        """Findings with a count above 0, those that corrupt training first."""
        counted = [finding for finding in self.findings if finding.count]
        return tuple(sorted(counted, key=lambda finding: finding.check.severity != CORRUPTS))

    @property
    def exit_status(self) -> int:
        """1 where something corrupts training, else 0."""
        return int(any(finding.check.severity == CORRUPTS for finding in self.found))

    def frame(self) -> pl.DataFrame:
        """One row a check: name, severity, count, looked, unit, effect, examples (list of "where: detail")."""
        rows = [
            {
                "name": f.check.name,
                "severity": f.check.severity,
                "count": f.count,
                "looked": f.looked,
                "unit": f.check.unit,
                "effect": f.check.effect,
                "examples": [f"{plain(e.where)}: {plain(e.detail)}" for e in f.examples],
            }
            for f in self.findings
        ]
        return pl.DataFrame(rows, schema_overrides={"examples": pl.List(pl.String)})

    def text(self) -> str:
        """Plain text for a terminal, safe whatever the source's text holds."""
        lines = [_title(self)]
        for severity in (CORRUPTS, WORTH_KNOWING):
            shown = [finding for finding in self.found if finding.check.severity == severity]
            lines += ["", severity] if shown else []
            for f in shown:
                lines += [f"  {f.check.name}  {_share(f)}", f"    {f.check.effect}"]
                lines += [f"    {plain(e.where)}: {plain(e.detail)}" for e in f.examples]
                lines += [f"    and {rest} more"] if (rest := f.count - len(f.examples)) > 0 and f.examples else []
        lines += ["", *_rest(self)]
        return "\n".join(lines) + "\n"


def section(report: Report) -> str:
    """An HTML section with nothing in it but escaped text and a table."""
    rows = "".join(
        f"<tr><td><b>{f.check.name}</b><br>{f.check.severity}</td><td>{html.escape(_share(f))}</td>"
        f"<td>{html.escape(f.check.effect)}<ul>"
        + "".join(f"<li><code>{_escaped(e.where)}</code> {_escaped(e.detail)}</li>" for e in f.examples)
        + "</ul></td></tr>"
        for f in report.found
    )
    heads = "<tr><th>check</th><th>count</th><th>what it does to training</th></tr>"
    table = f"<table>{heads}{rows}</table>" if rows else ""
    rest = "".join(f"<p>{_escaped(line, None)}</p>" for line in _rest(report))
    return f'<section class="text audit"><h2>Audit</h2><p>{_escaped(_title(report))}</p>{table}{rest}</section>'


def plain(text: str, longest: int | None = _LONGEST) -> str:
    """Text in one line without control characters, which a terminal might obey, and of a bounded length."""
    shown = printable(str(text)[: longest and longest + 1])
    return shown if longest is None or len(shown) <= longest else shown[:longest] + "…"


def _escaped(text: str, longest: int | None = _LONGEST) -> str:
    return html.escape(plain(text, longest))


def _title(report: Report) -> str:
    verdict = "something corrupts training" if report.exit_status else "nothing found that corrupts training"
    return (
        f"{plain(report.source)}: {report.episodes} episodes, {report.turns} turns, {report.groups} groups; {verdict}"
    )


def _share(finding: Finding) -> str:
    return f"{finding.count} of {finding.looked} {finding.check.unit}"


def _rest(report: Report) -> list[str]:
    silent = [f.check.name for f in report.findings if f.looked and not f.count]
    blind = [f"{f.check.name} ({f.check.needs})" for f in report.findings if not f.looked]
    lines = [f"looked and found nothing: {', '.join(silent)}"] if silent else []
    lines += [f"could not look, for lack of: {'; '.join(blind)}"] if blind else []
    return lines + [f"note: {plain(note, None)}" for note in report.notes]
