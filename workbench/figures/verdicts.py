"""Does it know when it succeeded? What a policy said of its own attempts, and which questions it could learn from."""

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from . import style

WHY = "a run of method self_verification records it, from its first verification on"


def frame(verifications: pl.DataFrame) -> pl.DataFrame:
    """A row a verification update, in order: step, loop, answers, right, unread, of_success and of_failure (share of
    answers that say success, where the attempt was one and where it was not), and of its questions how many were
    answered rightly every time (all), never (none) or only sometimes (mixed)."""
    style.need(verifications, ["step", "loop", "question", "truth", "advantage"], "verifications", WHY)
    said, truth = pl.col("verdict"), pl.col("truth")
    agrees = (said == truth).fill_null(False)
    answers = (
        verifications.group_by("step", "loop")
        .agg(
            pl.len().alias("answers"),
            agrees.mean().alias("right"),
            said.is_null().mean().alias("unread"),
            said.fill_null(False).filter(truth).mean().alias("of_success"),
            said.fill_null(False).filter(~truth).mean().alias("of_failure"),
        )
    )  # fmt: skip
    questions = (
        verifications.group_by("step", "loop", "question")
        .agg(agrees.mean().alias("share"))
        .group_by("step", "loop")
        .agg(
            (pl.col("share") == 1).sum().alias("all"),
            ((pl.col("share") > 0) & (pl.col("share") < 1)).sum().alias("mixed"),
            (pl.col("share") == 0).sum().alias("none"),
        )
    )
    return answers.join(questions, on=["step", "loop"]).sort("step", "loop")


def figure(verifications: pl.DataFrame) -> go.Figure:
    """Left, how often attempts are said to have succeeded, those that did and those that did not; right, how many
    questions got answers that differ."""
    found = frame(verifications)
    loops = found["loop"].max() + 1
    at = [step + loop / loops for step, loop in found.select("step", "loop").rows()]
    fig = make_subplots(
        1, 2, column_widths=[0.56, 0.44], horizontal_spacing=0.12,
        subplot_titles=["answers that say success", "questions by their answers"],
    )  # fmt: skip
    for column, name, colour, dash in (
        ("of_success", "of attempts that succeeded", style.SUCCESS, "solid"),
        ("of_failure", "of attempts that failed", style.FAILURE, "solid"),
        ("unread", "no verdict can be read", style.MUTED, "dot"),
    ):
        fig.add_scatter(
            x=at, y=found[column].to_list(), mode="lines+markers", name=name,
            line=dict(color=colour, width=1.8, dash=dash), marker=dict(size=7, color=colour),
            hovertemplate=f"step %{{x}}: %{{y:.0%}}, {name}<extra></extra>", row=1, col=1,
        )  # fmt: skip
    for column, name, colour in (
        ("all", "always right", style.GREEN), ("mixed", "right and wrong: learnt from", style.AMBER),
        ("none", "never right", "#c6ccd3"),
    ):  # fmt: skip
        fig.add_bar(
            x=at, y=found[column].to_list(), name=name, marker=dict(color=colour), width=0.72 / loops,
            hovertemplate=f"step %{{x}}: %{{y}} questions {name}<extra></extra>", row=1, col=2,
        )  # fmt: skip
    fig.update_layout(barmode="stack", legend_traceorder="normal")
    style.dress(
        fig,
        "Does it know when it succeeded?",
        "As many questions are about successes as about failures, so a verdict that never changes is right half of the "
        "time and the two lines fall together. A question teaches only where its answers are right and wrong.",
        height=320,
        panel_titles=True,
    )
    style.panel_titles(fig)
    few = found["step"].n_unique() <= 12
    fig.update_xaxes(title_text="step", dtick=1 if few else None)
    fig.update_yaxes(title_text="share of answers", tickformat=".0%", range=[-0.03, 1.03], col=1)
    fig.update_yaxes(title_text="questions", rangemode="tozero", col=2)
    return fig


def right(verifications: pl.DataFrame) -> float:
    """Share of all answers that were right; one without a verdict is not."""
    found = frame(verifications)
    return (found["right"] * found["answers"]).sum() / verifications.height


def sentences(verifications: pl.DataFrame) -> list[str]:
    """How many verdicts were right, and what the last ones could tell."""
    last, told = frame(verifications).row(-1, named=True), style.percent(right(verifications))
    questions = last["all"] + last["mixed"] + last["none"]
    return [
        f"Of {verifications.height} answers {told} were right; the same verdict for all attempts would have been right "
        "for half of them.",
        f"The last time it said success of {style.percent(last['of_success'])} where there was one and of "
        f"{style.percent(last['of_failure'])} where there was none; {last['mixed']} of {questions} questions got both "
        "right and wrong answers.",
    ]
