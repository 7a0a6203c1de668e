"""The figures of a plan as one interactive HTML file: plotly with everything inside, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from math import isnan
from typing import Any

from verl_audit.errors import AuditError
from verl_audit.plan.figures import Heatmap, Lane, heatmaps, timeline
from verl_audit.plan.search import Plan
from verl_audit.plan.svg import COLOURS, STOPS
from verl_audit.plan.trials import trials

CONFIG = {"displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}
"""The buttons named and no others: none that sends the data anywhere."""
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em}"
    "td,th{padding:.15em .7em;text-align:right}code{white-space:nowrap}"
)


def to_html(plan: Plan) -> str:
    """The whole page; AuditError where plotly is not installed."""
    try:
        import plotly.graph_objects as go  # noqa: PLC0415
        from plotly.io import to_html as draw  # noqa: PLC0415
        from plotly.offline import get_plotlyjs  # noqa: PLC0415
    except ImportError:
        raise AuditError("--html needs plotly: pip install 'verl-audit[plot]'; --figures DIR needs nothing") from None
    figures = [_heat(go, figure) for figure in heatmaps(plan)]
    lanes = timeline(plan)
    if lanes:
        figures.append(_lanes(go, lanes))
    drawn = (
        draw(figure, include_plotlyjs=False, full_html=False, config=CONFIG, div_id=f"figure-{i}")
        for i, figure in enumerate(figures)
    )
    return (
        "<!-- verl-audit plan -->\n<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data: blob:\">"
        f"<title>verl-audit plan</title><style>{STYLE}</style>\n<script>{get_plotlyjs()}</script></head><body>\n"
        f"<h1>Plan for {plan.limits.cards} cards</h1>\n{_shortlist(plan)}\n{''.join(drawn)}\n"
        f"{_trials(plan)}\n</body></html>\n"
    )


def _heat(go: Any, figure: Heatmap) -> Any:
    colours = [f"rgb{stop}" for stop in STOPS]
    best = figure.values[figure.rollout.index(figure.chosen[1]), figure.train.index(figure.chosen[0])]
    low, high = (best, 4 * best) if figure.better == "low" else (best / 4, best)
    drawn = go.Heatmap(
        x=list(figure.train),
        y=list(figure.rollout),
        z=[[None if isnan(v) else round(v, 4) for v in row] for row in figure.values.tolist()],
        colorscale=colours[::-1] if figure.better == "low" else colours,
        zmin=low,
        zmax=high,
        hovertemplate="%{x} training, %{y} rollout: %{z:.3f}<extra></extra>",
    )
    mark = go.Scatter(
        x=[figure.chosen[0]],
        y=[figure.chosen[1]],
        mode="markers",
        marker={"symbol": "square-open", "size": 18, "color": COLOURS["sync"], "line": {"width": 3}},
        hoverinfo="skip",
        showlegend=False,
    )
    layout = {
        "title": {"text": f"{figure.title}<br><sub>{escape(figure.note)}</sub>"},
        "xaxis": {"title": {"text": "training cards"}},
        "yaxis": {"title": {"text": "rollout cards"}},
        "height": 620,
        "width": 720,
        "template": "plotly_white",
    }
    return go.Figure([drawn, mark], layout)


def _lanes(go: Any, lanes: tuple[Lane, ...]) -> Any:
    figure = go.Figure()
    names = [
        name for lane in lanes for name in (f"{lane.title.split()[0]} trainer", f"{lane.title.split()[0]} rollouts")
    ]
    legend = set[str]()
    for i, lane in enumerate(lanes):
        row = 2 * i
        for kind in ("update", "wait", "sync"):
            blocks = [b for b in lane.blocks if b.kind == kind]
            figure.add_bar(
                orientation="h",
                y=[-row] * len(blocks),
                x=[b.end - b.start for b in blocks],
                base=[b.start for b in blocks],
                marker={"color": COLOURS[kind]},
                name=kind,
                legendgroup=kind,
                showlegend=bool(blocks) and kind not in legend,
                hovertemplate=f"{kind} %{{base:.3f}} + %{{x:.3f}}<extra></extra>",
            )
            legend |= {kind} if blocks else set()
        figure.add_scatter(
            x=[t for t, _ in lane.busy],
            y=[-row - 1.4 + 0.8 * share for _, share in lane.busy],
            customdata=[share for _, share in lane.busy],
            line={"color": COLOURS["rollout"]},
            name="rollout slots busy",
            legendgroup="busy",
            showlegend=i == 0,
            hovertemplate="%{customdata:.0%} busy<extra></extra>",
        )
    figure.update_layout(
        title={"text": "What both pools do, simulated"},
        barmode="overlay",
        xaxis={"title": {"text": "time, in updates of the reference run"}},
        yaxis={"tickvals": [-n for n in range(len(names))], "ticktext": names},
        height=180 + 130 * len(lanes),
        width=900,
        template="plotly_white",
    )
    return figure


def _shortlist(plan: Plan) -> str:
    head = "<tr><th>train:rollout<th>k<th>theta<th>time / reference<th>range<th>lag, updates<th>best in</tr>"
    rows = "".join(
        f"<tr><td>{c.split.name}<td>{c.split.updates}<td>{c.split.theta:g}<td>{c.relative:.3f}"
        f"<td>{c.low:.2f} - {c.high:.2f}<td>{c.split.lag_updates:.1f}<td>{c.good_in} of {len(plan.scenarios)}</tr>"
        for c in plan.shortlist
    )
    return f"<p>Reference: {escape(plan.profile.work.reference.name)}</p><table>{head}{rows}</table>"


def _trials(plan: Plan) -> str:
    items = "".join(
        f"<li><b>{escape(t.what)}, {t.split}</b>: {escape(t.why)}.<br>"
        f"<code>{'<br>'.join(map(escape, t.settings))}</code><br>"
        f"{t.steps} steps, the first {t.skip} left out. Expect {escape(t.expect)}.</li>"
        for t in trials(plan)
    )
    unknown = "".join(
        f"<li>{escape(u.what)}: taken as {escape(u.taken)}. Measure: {escape(u.measure)}.</li>"
        for u in plan.profile.work.unknown
    )
    return f"<h2>Test plan</h2><ol>{items}</ol><h2>Not determined</h2><ul>{unknown}</ul>"
