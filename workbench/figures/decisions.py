"""Where does the agent decide, and on what does that rest? DEAR's tokens (arXiv 2606.22830) in the text of a turn.

Decisions are the tokens of a turn at which the agent was the most undecided. Evidence needs hidden states, so it is
known of runs of method dear alone; of other runs the decisions are told from the recorded entropy.
"""

import plotly.graph_objects as go
import polars as pl

from ..errors import WorkbenchError
from . import style
from .tokens import draw_cells, dress_cells, hover, lay_out, token_rows

DECISION, EVIDENCE, OTHER = style.PURPLE, style.mix(style.AMBER, "#ffffff", 0.35), "#f4f5f6"
NO_ENTROPY = "the policy's entropy tells where it decides"


def recorded(turns: pl.DataFrame) -> bool:
    """Whether a run recorded decisions and evidence of its own."""
    return "decision" in turns.columns and turns["decision"].null_count() < turns.height


def known(turns: pl.DataFrame) -> bool:
    """Whether decisions can be told, from a record of them or of the entropy."""
    return recorded(turns) or ("entropy" in turns.columns and turns["entropy"].null_count() < turns.height)


def with_decisions(turns: pl.DataFrame, share: float = 0.2) -> pl.DataFrame:
    """Turns with `decision`, 1 or 0 a token: as recorded, else the `share` of each turn's tokens of largest entropy,
    rounded up. WorkbenchError where a run has neither, or share lies outside (0, 1]."""
    if not 0 < share <= 1:
        raise WorkbenchError(f"decisions: share must lie in (0, 1], got {share}")
    if recorded(turns):
        return turns
    style.need(turns, ["entropy"], "turns", NO_ENTROPY)
    rows = turns.filter(pl.col("entropy").is_not_null()).with_row_index("_row")
    tokens = rows.select("_row", "entropy").explode("entropy").with_row_index("_at")
    tokens = tokens.sort(["_row", "entropy", "_at"], descending=[False, True, False])
    rank, most = pl.int_range(pl.len()).over("_row"), (share * pl.len().over("_row") - 1e-9).ceil()
    chosen = tokens.with_columns((rank < most).cast(pl.Float32).alias("decision")).sort("_at")
    lists = chosen.group_by("_row", maintain_order=True).agg("decision")
    return rows.join(lists, on="_row", how="left").drop("_row")


def marked(
    turns: pl.DataFrame, step: int, episode: int, turn: int = -1, share: float = 0.2, limit: int = 600
) -> go.Figure:
    """The text of a turn (or of an episode, turn = -1) with its decisions and its evidence marked.

    share: of a turn's tokens that are decisions, where the run recorded none. At most `limit` tokens are drawn.
    """
    frame = with_decisions(turns, share)
    tokens = token_rows(frame, step, episode, turn)
    left_out, tokens = len(tokens) - limit, tokens[:limit]
    seen = style.pick(turns, "turns", step=step, episode=episode).select("turn", "observation").rows()
    placed, heads, lines = lay_out(tokens, dict(seen))
    shown = [t for t, *_ in placed]
    kinds = [_kind(t) for t in shown]
    colours = {"decision": DECISION, "evidence": EVIDENCE, "left out": OTHER}
    fig = draw_cells(
        placed, heads, [colours[k] for k in kinds], [_told(t, k) for t, k in zip(shown, kinds, strict=True)], kinds,
        "token",
    )  # fmt: skip
    has_evidence = recorded(turns)
    for name in ("decision", "evidence", "left out") if has_evidence else ("decision", "left out"):
        fig.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            marker=dict(symbol="square", size=11, color=colours[name], line=dict(color="#d5dae0", width=0.6)),
            name=f"{name} ({kinds.count(name)})",
            hoverinfo="skip",
        )
    where = f"turn {turn + 1} of episode {episode}" if turn >= 0 else f"episode {episode}"
    rest = (
        "Evidence lies closest to a decision in the agent's hidden states, the more so where the teacher disagrees; "
        "what is neither is not distilled."
        if has_evidence
        else "What decisions rest on takes hidden states to tell, which runs of method dear record."
    )
    extra = f" The last {left_out} tokens are not drawn." if left_out > 0 else ""
    subtitle = f"Step {step}, {where}. Decisions: the tokens of a turn with the largest entropy. {rest}{extra}"
    dress_cells(fig, "Where does the agent decide, and on what does that rest?", subtitle, heads, lines, legend=True)
    return fig


def words(turns: pl.DataFrame, steps: pl.DataFrame | None = None, share: float = 0.2) -> list[str]:
    """How many tokens were chosen, which they are most often, and how much of the gradient they carry."""
    frame = with_decisions(turns, share)
    has_evidence = recorded(turns)
    columns = ["pieces", "decision", *(["support"] if has_evidence else [])]
    tokens = frame.select(columns).explode(columns)
    chosen = {"decisions": "decision"} | ({"evidence": "support"} if has_evidence else {})
    counts = " and ".join(f"{int(tokens[c].sum()):,} are {name}" for name, c in chosen.items())
    out = [f"Of {tokens.height:,} recorded tokens {counts}."]
    for name, column in chosen.items():
        top = (
            tokens.filter(pl.col(column) > 0)["pieces"]
            .value_counts(sort=True)
            .sort(["count", "pieces"], descending=[True, False])
        )
        listed = ", ".join(f"“{piece}” ({count:,})" for piece, count in top.head(4).rows())
        out.append(f"Most often {name}: {listed}." if listed else f"No token is {name}.")
    if steps is not None and "mass_kept" in steps.columns and steps["mass_kept"].null_count() < steps.height:
        first, both = (style.percent(steps[c].mean()) for c in ("mass_decisions", "mass_kept"))
        out.append(
            f"Decisions carry {first} of the distillation gradient's mass, with evidence {both} (mean of steps)."
        )
    return out


def _kind(token: dict) -> str:
    return "decision" if token["decision"] else "evidence" if token["support"] else "left out"


def _told(token: dict, kind: str) -> str:
    score = token["support_score"]
    why = f", evidence score {style.number(score, '.2f')} of 2" if score is not None and kind != "decision" else ""
    return f"{hover(token)}<br><b>{kind}</b>{why}"
