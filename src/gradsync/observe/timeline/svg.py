"""A drawing as SVG: one file that needs nothing else, in light or dark as the viewer prefers. Pure."""

from __future__ import annotations

from html import escape

from gradsync.observe.timeline.drawing import PALETTE, Drawing, Line, Rect, Text

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def svg(drawing: Drawing) -> str:
    width, height = _number(drawing.width), _number(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(drawing.title)}" font-family="{escape(FONT)}">',
        f"<style>{_style()}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        *(_element(shape) for shape in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    light = "".join(f".{name}{{fill:{color.light};stroke:{color.light}}}" for name, color in PALETTE.items())
    dark = "".join(f".{name}{{fill:{color.dark};stroke:{color.dark}}}" for name, color in PALETTE.items())
    return f"rect,text{{stroke:none!important}}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _element(shape: Rect | Text | Line) -> str:
    if isinstance(shape, Rect):
        attributes = f'x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(max(shape.width, 0.3))}"'
        rounded = ' rx="2"' if shape.width > 6 and shape.height > 6 else ""
        attributes += f' height="{_number(shape.height)}" class="{shape.color}"{rounded}'
        return (
            f"<rect {attributes}><title>{escape(shape.title)}</title></rect>"
            if shape.title
            else f"<rect {attributes}/>"
        )
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="3 3"' if shape.dashed else ""
        ends = f'x1="{_number(shape.x)}" y1="{_number(shape.y)}" x2="{_number(shape.to_x)}" y2="{_number(shape.to_y)}"'
        return f'<line {ends} class="{shape.color}"{dashes}/>'
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    weight = ' font-weight="600"' if shape.bold else ""
    attributes = f'x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"{anchor}{weight}'
    return f'<text {attributes} class="{shape.color}" pointer-events="none">{escape(shape.text)}</text>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
