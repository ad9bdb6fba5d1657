"""Pictures and pages of a comparison: overlaid curves (PNG) and a self-contained HTML report."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determinism.compare import Comparison
    from determinism.runs import Run

STYLES = ("-", "--", ":", "-.")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>exactrl compare</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #222; }}
 h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }} img {{ max-width: 100%; }}
 table {{ border-collapse: collapse; font-size: 13px; }} td, th {{ border: 1px solid #ddd; padding: 2px 8px; text-align: left; }}
 .grid td {{ padding: 0; width: 14px; height: 14px; border-color: #fff; }} .grid th {{ border: 0; font-weight: normal; white-space: nowrap; }}
 .e {{ background: #4c9f70; }} .d {{ background: #d1495b; }} .m {{ background: #eee; }}
 .same {{ color: #2b7a4b; }} .different {{ color: #b3273b; }} pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; }}
</style></head><body>
<h1>exactrl compare</h1>
{body}
</body></html>
"""


def plot_curves(runs: Sequence[Run], metrics: Sequence[str], target: Path | io.BytesIO) -> None:
    """Draw one panel a metric with all runs in it; later runs are dashed, so that equal curves are seen to coincide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(1, len(metrics), figsize=(6.5 * len(metrics), 4.2), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        for i, run in enumerate(runs):
            points = [(step, values[metric]) for step, values in sorted(run.metrics.items()) if metric in values]
            width = 4.0 if i == 0 and len(runs) > 1 else 1.8
            axis.plot(
                *zip(*points, strict=True) if points else ([], []),
                STYLES[i % 4],
                label=run.name,
                linewidth=width,
                alpha=0.45 if width > 2 else 1,
            )
        axis.set_title(metric)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120, format="png")
    pyplot.close(figure)


def write_html(runs: Sequence[Run], comparisons: Sequence[Comparison], metrics: Sequence[str], path: Path) -> None:
    """One file without outside references: verdicts, curves, grids, the first divergence in full, differing fields."""
    picture = io.BytesIO()
    plot_curves(runs, metrics, picture)
    encoded = base64.b64encode(picture.getvalue()).decode()
    body = [f'<h2>Curves</h2><img alt="curves" src="data:image/png;base64,{encoded}">']
    body += [_comparison(comparison) for comparison in comparisons]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.format(body="\n".join(body)), encoding="utf-8")


def _comparison(comparison: Comparison) -> str:
    from determinism.compare import describe

    verdict = "same" if comparison.same else "different"
    title = f"{html.escape(comparison.a)} against {html.escape(comparison.b)}"
    parts = [
        f'<h2>{title}: <span class="{verdict}">{verdict}</span></h2>',
        f"<pre>{html.escape(describe(comparison))}</pre>",
    ]
    parts.append(_grid(comparison))
    if comparison.fields:
        parts.append("<h3>Differing manifest fields</h3>" + _table([(d.field, d.a, d.b) for d in comparison.fields]))
    return "\n".join(parts)


def _grid(comparison: Comparison) -> str:
    """Phases down, steps across; green equal, red unequal, grey recorded in one run or in none."""
    phases = list(dict.fromkeys(phase for row in comparison.grid.values() for phase in row))
    head = "".join(f"<th>{step if step % 5 == 0 else ''}</th>" for step in comparison.grid)
    rows = []
    for phase in phases:
        cells = []
        for step, row in comparison.grid.items():
            kind = {None: "m", True: "e", False: "d"}[row.get(phase)]
            only = ", in one run only" if phase in row and row[phase] is None else ""
            cells.append(f'<td class="{kind}" title="step {step}, {html.escape(phase)}{only}"></td>')
        rows.append(f"<tr><th>{html.escape(phase)}</th>{''.join(cells)}</tr>")
    return f'<table class="grid"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def _table(rows: Sequence[tuple[str, Any, Any]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><tr><th>field</th><th>A</th><th>B</th></tr>{cells}</table>"
