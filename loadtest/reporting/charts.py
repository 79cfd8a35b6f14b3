"""Charts as SVG elements, which a page embeds; they use no script and no external file.

They are elements and not text, so the serializer escapes every label. Colours are CSS classes, because only the page
knows whether its theme is light or dark. If there are too many points, the extremes are kept: an outlier that is not
drawn looks like one that does not exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element, SubElement

import numpy as np
from msgspec import Struct

from loadtest.analysis.statistics import Floats, Integers

WIDTH, HEIGHT = 720.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 26.0, 34.0
TICK_DISTANCE = 75.0  # in pixels: labels must not overlap
NUM_COLOURS = 6
NUM_ROWS = 5  # of a grid
MAX_MARKS = 20  # of a line: more points get no visible marks
MAX_TOOLTIPS = 120  # of a line: more points get no tooltips
NUM_COLUMNS = 360  # of a line: two pixels each
# What XML 1.0 cannot hold, even escaped.
UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Series(Struct, frozen=True):
    """What is drawn in one colour. NaN: no value; a line is broken there."""

    label: str
    x: Floats
    y: Floats
    colour: int = 0
    is_points: bool = False
    is_dashed: bool = False
    radius: float = 2.0  # of points
    notes: Sequence[str] = ()  # tooltips, one for each point, in place of the values


class Axis(Struct, frozen=True):
    """A bound of None is that of the data; a linear axis begins at 0."""

    label: str = ""
    text: Callable[[float], str] = lambda value: f"{value:g}"
    is_logarithmic: bool = False
    low: float | None = None
    high: float | None = None


def without_control_characters(text: str) -> str:
    """Replace characters that XML cannot hold, such as the colours in a server's error message."""
    return UNWRITABLE.sub("\ufffd", text)


def element(parent: Element | None, tag: str, text: str = "", **attributes: str | float) -> Element:
    """Make a child element. In names `_` stands for `-`, and `class_` for `class`. Numbers get one decimal."""
    values = {
        name.rstrip("_").replace("_", "-"): without_control_characters(value)
        if isinstance(value, str)
        else f"{value:.1f}"
        for name, value in attributes.items()
    }
    made = Element(tag, values) if parent is None else SubElement(parent, tag, values)
    made.text = without_control_characters(text)
    return made


# -- fewer points -----------------------------------------------------------------------------------------------------


def downsample_line(x: Floats, y: Floats, num_columns: int = NUM_COLUMNS) -> tuple[Floats, Floats]:
    """Keep at most four points for each column: the first, lowest, highest and last, so that the line looks the same.

    x ascends. (The M4 aggregation: Jugel et al., PVLDB 7(10), 2014.)
    """
    if len(x) <= 4 * num_columns:
        return x, y
    kept = _extremes(x, y, num_columns)
    starts = np.flatnonzero(np.diff(_columns(x, num_columns), prepend=-1))
    kept = np.unique(np.concatenate([kept, starts, starts[1:] - 1, [len(x) - 1]]))
    return x[kept], y[kept]


def downsample_points(x: Floats, y: Floats, num_kept: int) -> Integers:
    """Return which points to draw: the lowest and highest of each column, and evenly spaced others."""
    if len(x) <= num_kept:
        return np.arange(len(x), dtype=np.int64)
    extremes = _extremes(x, y, max(1, num_kept // 4))
    others = np.linspace(0, len(x) - 1, max(1, num_kept - len(extremes))).astype(np.int64)
    return np.unique(np.concatenate([extremes, others]))


def _columns(x: Floats, num_columns: int) -> Integers:
    low, width = float(x.min()), float(np.ptp(x)) or 1.0
    columns: Integers = np.minimum((x - low) / width * num_columns, num_columns - 1).astype(np.int64)
    return columns


def _extremes(x: Floats, y: Floats, num_columns: int) -> Integers:
    columns = _columns(x, num_columns)
    order = np.lexsort((y, columns))
    is_first = np.diff(columns[order], prepend=-1) != 0
    kept: Integers = order[is_first | np.append(is_first[1:], True)]
    return kept


# -- scales -----------------------------------------------------------------------------------------------------------


class Scale(Struct, frozen=True):
    """A mapping from values to pixels."""

    low: float
    high: float
    first_pixel: float
    last_pixel: float
    is_logarithmic: bool

    @property
    def is_across(self) -> bool:
        return self.last_pixel > self.first_pixel

    def __call__(self, values: Floats) -> Floats:
        low, high = self.low, self.high
        if self.is_logarithmic:
            values, low, high = np.log(np.maximum(values, self.low)), math.log(low), math.log(high)
        pixels: Floats = self.first_pixel + (values - low) / (high - low) * (self.last_pixel - self.first_pixel)
        return pixels

    def ticks(self) -> list[float]:
        num = max(2, round(abs(self.last_pixel - self.first_pixel) / TICK_DISTANCE)) if self.is_across else NUM_ROWS
        # Within less than a decade, a logarithm is nearly linear.
        if self.is_logarithmic and self.high > 6.0 * self.low:
            return _logarithmic_ticks(self.low, self.high)
        return _ticks(self.low, self.high, num)


def _scale(axis: Axis, values: Floats, first_pixel: float, last_pixel: float) -> Scale:
    known = values[np.isfinite(values)]
    if axis.is_logarithmic:
        known = known[known > 0.0]
        low = axis.low or float(known.min(initial=math.inf))
        high = axis.high or float(known.max(initial=0.0))
        if not 0.0 < low < high < math.inf:
            low, high = (low / 2.0, low * 2.0) if 0.0 < low < math.inf else (1e-3, 1.0)
        return Scale(low, high, first_pixel, last_pixel, True)
    low = axis.low if axis.low is not None else min(0.0, float(known.min(initial=0.0)))
    high = axis.high if axis.high is not None else float(known.max(initial=low))
    return Scale(low, high if high > low else low + 1.0, first_pixel, last_pixel, False)


def _ticks(low: float, high: float, num: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten (Heckbert, "Nice numbers for graph labels", 1990)."""
    wanted = (high - low) / num
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= wanted * 0.999)
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _logarithmic_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    num_decades = math.log10(high / low)
    factors = (1.0,) if num_decades > 3.0 else (1.0, 3.0) if num_decades > 1.5 else (1.0, 2.0, 5.0)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


# -- charts -----------------------------------------------------------------------------------------------------------


def chart(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    max_points: int = 1000,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Element:
    """Draw one chart; the title names the y axis. Clouds are thinned to `max_points`."""
    svg = element(None, "svg", viewBox=f"0 0 {width:g} {height:g}", role="img", class_="chart")
    element(svg, "title", title)
    element(svg, "text", title, x=4.0, y=14.0, class_="heading")
    all_x = np.concatenate([np.zeros(0), *(each.x for each in series)])
    all_y = np.concatenate([np.zeros(0), *(each.y for each in series)])
    frame = _Frame(svg, x, y, _scale(x, all_x, LEFT, width - RIGHT), _scale(y, all_y, height - BOTTOM, TOP))
    frame.draw_axes()
    for each in series:
        if each.is_points:
            frame.draw_points(each, max_points)
        else:
            frame.draw_line(each)
    _draw_legend(svg, series, width)
    if not (np.isfinite(all_x) & np.isfinite(all_y)).any():
        element(svg, "text", "nothing was measured", x=width / 2, y=height / 2, class_="tick middle")
    return svg


class _Frame(Struct, frozen=True):
    """The axes and scales of one chart."""

    svg: Element
    x: Axis
    y: Axis
    across: Scale
    down: Scale

    def draw_axes(self) -> None:
        left, right, bottom = self.across.first_pixel, self.across.last_pixel, self.down.first_pixel
        for value in self.down.ticks():
            place = float(self.down(np.array([value]))[0])
            element(self.svg, "line", x1=left, x2=right, y1=place, y2=place, class_="grid")
            element(self.svg, "text", self.y.text(value), x=left - 6, y=place + 4, class_="tick end")
        for value in self.across.ticks():
            place = float(self.across(np.array([value]))[0])
            element(self.svg, "line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="axis")
            element(self.svg, "text", self.x.text(value), x=place, y=bottom + 15, class_="tick middle")
        element(self.svg, "line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")
        element(self.svg, "text", self.x.label, x=right, y=bottom + 30, class_="tick end")

    def draw_points(self, series: Series, max_points: int) -> None:
        places = np.flatnonzero(np.isfinite(series.x) & np.isfinite(series.y))
        if len(places):
            places = places[downsample_points(series.x[places], series.y[places], max_points)]
        self._draw_circles("points", series, places, series.radius)

    def draw_line(self, series: Series) -> None:
        is_known = np.isfinite(series.x) & np.isfinite(series.y)
        parts = []
        for places in np.split(np.arange(len(series.x)), np.flatnonzero(~is_known)):
            piece = places[is_known[places]]
            if not len(piece):
                continue
            x, y = downsample_line(series.x[piece], series.y[piece])
            pixels = [f"{a:.1f} {b:.1f}" for a, b in zip(self.across(x), self.down(y), strict=True)]
            # A line to itself is a dot, so that a single value between gaps is visible.
            parts.append("M" + "L".join(pixels if len(pixels) > 1 else pixels * 2))
        dashed = " dashed" if series.is_dashed else ""
        element(self.svg, "path", d="".join(parts), class_=f"line c{series.colour % NUM_COLOURS}{dashed}")
        places = np.flatnonzero(is_known)
        if len(places) <= MAX_TOOLTIPS:
            self._draw_circles("points" if len(places) <= MAX_MARKS else "touch", series, places, 3.0)

    def _draw_circles(self, kind: str, series: Series, places: Integers, radius: float) -> None:
        group = element(self.svg, "g", class_=f"{kind} c{series.colour % NUM_COLOURS}")
        x, y = series.x[places], series.y[places]
        for index, (across, down) in enumerate(zip(self.across(x), self.down(y), strict=True)):
            circle = element(group, "circle", cx=float(across), cy=float(down), r=radius)
            text = f"{self.x.text(float(x[index]))}: {self.y.text(float(y[index]))}"
            element(circle, "title", series.notes[int(places[index])] if series.notes else text)


def _draw_legend(svg: Element, series: Sequence[Series], width: float) -> None:
    """Draw the legend as one line of text with its keys, at the right: the width of the letters is not known here."""
    labelled = [each for each in series if each.label]
    if not labelled:
        return
    line = element(svg, "text", x=width - RIGHT, y=14.0, class_="tick end")
    for place, each in enumerate(labelled):
        label = each.label if len(each.label) <= 40 else each.label[:39] + "…"
        gap = "\u00a0" * 3 if place + 1 < len(labelled) else ""
        key = element(line, "tspan", "\u25a0", class_=f"key c{each.colour % NUM_COLOURS}")
        key.tail = without_control_characters(f"\u00a0{label}{gap}")


def cumulative(values: Floats, num_points: int = 300) -> tuple[Floats, Floats]:
    """Return values of a distribution and the shares that do not exceed them; steps get finer at the upper end.

    The smallest and the largest value are included: a curve that ends before its maximum hides it.
    """
    known = np.sort(values[~np.isnan(values)])
    if not known.size:
        return known, known
    tail = 1.0 - 10.0 ** -np.linspace(1.0, 6.0, num_points // 4)
    shares = np.unique(np.concatenate([np.linspace(0.0, 1.0, num_points), tail]))
    places = np.unique(np.ceil(shares * (len(known) - 1)).astype(np.int64))
    return known[places], (places + 1) / len(known)
