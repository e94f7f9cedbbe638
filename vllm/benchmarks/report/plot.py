"""Plots of runs; matplotlib is an extra (``vllm[bench]``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vllm.benchmarks.client.observation import Observation

_HIT, _MISS = "#1b7f5c", "#c2452d"
_DPI = 90


def make_figure(num_plots: int, width: float = 5.2, height: float = 3.6) -> tuple[Figure, Any]:
    """Return a figure with plots side by side, and the list of them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        # Late, as an extra; the object interface needs no display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "Plots need matplotlib: install the extra, vllm[bench], or leave --plot out."
        ) from error
    figure = Figure(figsize=(width * num_plots, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, num_plots, squeeze=False)[0])


def check_can_plot(path: Path | None) -> None:
    """Refuse a plot that cannot be made, before the run.

    Raises:
        ConfigError: matplotlib is missing, the folder is, or the name is no image's.
    """
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {path} must end with .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}.")
    make_figure(1)


def save(figure: Figure, path: Path) -> None:
    """Write a figure."""
    figure.savefig(path, dpi=_DPI)


def plot_run(seen: Sequence[Observation], path: Path, title: str) -> None:
    """Plot a run: times to first token by arrival and as a distribution, hits apart from misses."""
    figure, (timeline, histogram) = make_figure(2)
    done = [o for o in seen if o.success]
    groups: list[tuple[str, str, list[Observation]]] = [
        ("hit", _HIT, [o for o in done if o.usage.cached_tokens]),
        ("miss", _MISS, [o for o in done if o.usage.cached_tokens == 0]),
        ("not reported", "#777777", [o for o in done if o.usage.cached_tokens is None]),
    ]
    drawn = [(label, color, own) for label, color, own in groups if own]
    for label, color, own in drawn:
        timeline.scatter(
            [o.start_s for o in own], [1e3 * o.ttft_s for o in own], s=9, c=color, label=label
        )
    if drawn:
        histogram.hist(
            [[1e3 * o.ttft_s for o in own] for _, _, own in drawn],
            bins=30,
            color=[color for _, color, _ in drawn],
            label=[label for label, _, _ in drawn],
            stacked=True,
        )
        histogram.legend()
    _label(timeline, "sent (s)", "TTFT (ms)")
    _label(histogram, "TTFT (ms)", "requests")
    figure.suptitle(title)
    save(figure, path)


def plot_timeline(seen: Sequence[Observation], path: Path, title: str) -> None:
    """Plot each request as a line: waiting for its first token, then decoding."""
    figure, (axes,) = make_figure(1, 9.0, 4.5)
    for number, o in enumerate(o for o in seen if o.success):
        axes.hlines(number, o.start_s, o.start_s + o.ttft_s, color=_MISS, linewidth=1)
        axes.hlines(number, o.start_s + o.ttft_s, o.start_s + o.latency_s, color=_HIT, linewidth=1)
    _label(axes, "s (red: until the first token)", "request")
    figure.suptitle(title)
    save(figure, path)


def plot_lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    title: str,
    is_log_x: bool = False,
) -> None:
    """Plot named lines of (x, y)."""
    figure, (axes,) = make_figure(1, 6.4, 4.2)
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    if is_log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    _label(axes, x_label, y_label)
    axes.legend(fontsize=8)
    figure.suptitle(title)
    save(figure, path)


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
