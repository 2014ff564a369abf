"""Line charts as SVG: panels in rows of two with one legend, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
COLORS = ("#111111", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#cc79a7", "#d55e00", "#888888")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, LINE = 460, 320, 62, 14, 34, 44, 18  # pixels; of a panel, and its margins


@dataclass(frozen=True)
class Panel:
    """A plot. A line's color is that of its name, in all panels. On a logarithmic axis, 0 is drawn at its lower end."""

    title: str
    x: str
    y: str
    lines: dict[str, Points]
    is_log: bool = False

    def draw(self, colors: dict[str, str]) -> str:
        """Return the panel's SVG, drawn from the origin."""
        lines = {name: [point for point in line if all(map(math.isfinite, point))] for name, line in self.lines.items()}
        points = [point for line in lines.values() for point in line]
        xs, ys = [x for x, _ in points] or [0.0], [y for _, y in points if y > 0 or not self.is_log] or [1.0]
        x_ticks, y_ticks = _ticks(min(xs), max(xs)), (_powers if self.is_log else _ticks)(min(ys), max(ys))
        x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
        y_low, y_high = self._scale(y_ticks[0]), self._scale(y_ticks[-1])

        def place(x: float, y: float) -> tuple[float, float]:
            across = (x - x_low) / (x_high - x_low)
            up = (self._scale(y) - y_low) / (y_high - y_low)
            return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

        parts = [_text(LEFT, TOP - 14, self.title, "title")]
        for tick in y_ticks:
            _, y = place(x_low, tick)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LEFT - 6, y + 4, _number(tick), "end"))
        for tick in x_ticks:
            x, y = place(tick, y_ticks[0])
            if x_low <= tick <= x_high:
                parts.append(_text(x, y + 16, _number(tick), "middle"))
        parts.append(_text((WIDTH + LEFT - RIGHT) / 2, HEIGHT - 8, self.x, "middle"))
        middle = (HEIGHT + TOP - BOTTOM) / 2
        turned = f'transform="rotate(-90 14 {middle})"'
        parts.append(f'<text class="middle" x="14" y="{middle}" {turned}>{escape(self.y)}</text>')
        for under, (name, line) in zip(reversed(range(len(lines))), lines.items(), strict=True):
            shown = [place(x, max(y, y_ticks[0])) for x, y in line]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
            width = 1.5 + 0.8 * under  # a line that is covered by others shows at its edges
            parts.append(f'<polyline stroke="{colors[name]}" stroke-width="{width:.1f}" points="{path}"/>')
        return "\n".join(parts)

    def _scale(self, y: float) -> float:
        return math.log10(y) if self.is_log else y


def draw_chart(panels: Sequence[Panel]) -> str:
    """Return an SVG with all panels and, below, what the colors mean."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    width, height = WIDTH * columns, HEIGHT * rows + LINE * -(-len(names) // columns) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    style = (
        "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.end{text-anchor:end}.middle{text-anchor:middle}"
        ".grid{stroke:#ddd}polyline{fill:none;stroke-linejoin:round}"
    )
    parts = [head, f"<style>{style}</style>", f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for index, panel in enumerate(panels):
        place = f"translate({index % 2 * WIDTH} {index // 2 * HEIGHT})"
        parts.append(f'<g transform="{place}">\n{panel.draw(colors)}\n</g>')
    for index, (name, color) in enumerate(colors.items()):
        x, y = LEFT + index % columns * WIDTH, HEIGHT * rows + 8 + index // columns * LINE
        parts += [f'<rect x="{x}" y="{y}" width="18" height="4" fill="{color}"/>', _text(x + 26, y + 7, name)]
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers around a range, about five.

    >>> _ticks(0.3, 4.1)
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if high <= low:
        low, high = low - max(1.0, abs(low) / 10), high + max(1.0, abs(high) / 10)
    rough = (high - low) / 4
    size: float = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= 0.999 * rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten around a range of positive numbers.

    >>> _powers(0.02, 3.0)
    [0.01, 0.1, 1.0, 10.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
