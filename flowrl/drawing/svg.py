"""The small things that pictures are made of: escaped text, its width, elements, curves, arrow heads."""

from __future__ import annotations

import html
import re
from typing import Any

Point = tuple[float, float]

INK, FADED, PAPER, BORDER = "#212529", "#5c636a", "#ffffff", "#dee2e6"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

# What XML 1.0 forbids: most control characters, surrogates, U+FFFE and U+FFFF.
_ILLEGAL = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NARROW, _WIDE = frozenset("iIjl.,:;|!'`()[]{}ftr "), frozenset("mwMW@%")


def escape(text: Any, limit: int = 2000) -> str:
    """Text for an element or attribute of XML or HTML: without what XML forbids, cut where it is huge."""
    text = str(text)
    if len(text) > limit:
        text = text[:limit] + f"… ({len(text) - limit:,} more characters)"
    return html.escape(_ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text))


def one_line(text: Any) -> str:
    """Printable text without line breaks: names may come from users, and must not steer a terminal."""
    words = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def text_width(text: str, size: float) -> float:
    """About how wide a text is in a sans-serif font, in pixels; rather too wide than too narrow."""
    return size * sum(map(_em, text))


def _em(character: str) -> float:
    if character in _NARROW:
        return 0.36
    if character in _WIDE:
        return 0.92
    if ord(character) >= 0x2E80:  # Chinese, Japanese, Korean, and emoji
        return 1.05
    return 0.72 if character.isupper() else 0.6


def fit(text: str, size: float, width: float) -> str:
    """The text in one line, cut with an ellipsis to a width."""
    text = one_line(text[:1000])
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def coordinate(value: float) -> str:
    """A number without a trailing ``.0`` and without ``-0``."""
    return f"{round(value, 1) + 0.0:.12g}"


def element(name: str, *children: str, **attributes: Any) -> str:
    """An element. Children are markup; attributes are escaped, ``stroke_width`` means ``stroke-width``, those
    that are None are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def _attribute(value: Any) -> str:
    return coordinate(value) if isinstance(value, int | float) else escape(value, 1_000_000)


def label(x: float, y: float, content: str, *, size: float = 11, fill: str = INK, **attributes: Any) -> str:
    """A text; ``y`` is its base line."""
    return element("text", escape(content), x=x, y=y, font_size=size, fill=fill, **attributes)


def halo(x: float, y: float, content: str, fill: str) -> str:
    """A text in the middle of a line, on white."""
    width = text_width(content, 11) + 4
    return element(
        "rect", x=x - width / 2, y=y - 8, width=width, height=16, rx=4, fill=PAPER, fill_opacity="0.92"
    ) + label(x, y + 4, content, fill=fill, text_anchor="middle")


def pair(point: Point) -> str:
    """A point in a path."""
    return f"{coordinate(point[0])},{coordinate(point[1])}"


def s_curve(start: Point, end: Point) -> str:
    """A piece of a path that leaves and arrives vertically."""
    half = (end[1] - start[1]) / 2
    return f" C{pair((start[0], start[1] + half))} {pair((end[0], end[1] - half))} {pair(end)}"


def arrow_head(tip: Point, towards: Point) -> str:
    """The corners of an arrow head that points along a horizontal or vertical unit vector."""
    (x, y), (dx, dy) = tip, towards
    back = (x - 8 * dx, y - 8 * dy)
    corners = (tip, (back[0] - 4 * dy, back[1] - 4 * dx), (back[0] + 4 * dy, back[1] + 4 * dx))
    return " ".join(map(pair, corners))


def rounded(points: list[Point], radius: float = 8.0) -> str:
    """A path along horizontal and vertical pieces, with rounded corners, that ends inside its arrow head."""
    path = f"M{pair(points[0])}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        pieces = [max(abs(corner[0] - q[0]), abs(corner[1] - q[1])) for q in (before, after)]
        r = min(radius, *(p / 2 for p in pieces))
        if r >= 0.5:
            path += f" L{pair(_towards(corner, before, r))} Q{pair(corner)} {pair(_towards(corner, after, r))}"
    return path + f" L{pair(_towards(points[-1], points[-2], 5.0))}"


def _towards(point: Point, other: Point, distance: float) -> Point:
    dx, dy = other[0] - point[0], other[1] - point[1]
    length = max(abs(dx), abs(dy)) or 1.0
    return (point[0] + dx / length * distance, point[1] + dy / length * distance)
