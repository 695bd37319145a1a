"""The report as one self-contained page and its figures as PNG files."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from weakref import WeakKeyDictionary

import matplotlib
from matplotlib.figure import Figure

from moesaic._version import __version__
from moesaic.analysis.report.narrow import CSS_PER_INCH, lay_out_narrow
from moesaic.analysis.report.sections import Section
from moesaic.formats.atomic import atomic_file

POLICY = "default-src 'none';img-src data:;style-src 'unsafe-inline';script-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--paper:#fff;--line:#d9dce1;--dim:#5d6570;--card:#f6f7f9}
@media (prefers-color-scheme:dark){:root{--ink:#e7e9ec;--paper:#15171a;--line:#33383f;--dim:#9aa3ad;--card:#1e2125}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem}h1{font-size:1.5rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2rem 0 .5rem;border-top:1px solid var(--line);padding-top:1rem}
nav{display:flex;flex-wrap:wrap;gap:.25rem .9rem;font-size:.9rem}a{color:inherit}
p,li{overflow-wrap:anywhere}.dim,figcaption{color:var(--dim);font-size:.9rem}
.scroll{overflow-x:auto;max-width:100%}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.2rem .7rem .2rem 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:.6rem;margin:.6rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem .7rem}
.tile b{display:block;font-size:1.25rem}figure{margin:1rem 0}
img{max-width:100%;height:auto;background:#fff;border-radius:6px;border:1px solid var(--line)}
.text{font:14px/1.75 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:.7rem;max-height:28rem;overflow-y:auto}
.text span{border-radius:3px;color:#111}label{display:block;margin:.5rem 0}input[type=range]{width:min(100%,24rem)}
"""


# Below this width of the window a page shows the narrow pictures.
NARROW_WINDOW = 600
_drawn: WeakKeyDictionary[Figure, tuple[bytes, bytes]] = WeakKeyDictionary()


def figure_png(figure: Figure, *, narrow: bool = False) -> bytes:
    """PNG bytes of a figure, the same bytes for the same figure.

    Args:
        figure: drawn once, at the first call; what is changed in it later is not seen.
        narrow: laid out for a phone, see :mod:`moesaic.analysis.report.narrow`.
    """
    if figure not in _drawn:
        wide = io.BytesIO()
        with matplotlib.rc_context({"font.size": 9}):
            figure.savefig(wide, format="png", dpi=120, bbox_inches="tight", metadata={"Software": None})
        lay_out_narrow(figure)  # for good, so the wide one comes first and both are kept
        slim = io.BytesIO()
        figure.savefig(slim, format="png", dpi=2 * CSS_PER_INCH, metadata={"Software": None})
        _drawn[figure] = wide.getvalue(), slim.getvalue()
    return _drawn[figure][narrow]


def render_page(title: str, note: str, sections: list[Section]) -> str:
    """The whole page as one string: no request leaves it.

    Args:
        title: heading, escaped here.
        note: a line under the heading, escaped here.
        sections: bodies that have escaped what they took from the model or the text.
    """
    links = " ".join(f'<a href="#{html.escape(s.slug)}">{html.escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{html.escape(title)} · moesaic</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>
<h1>{html.escape(title)}</h1><p class="dim">{html.escape(note)}</p><nav>{links}</nav>
{body}
<p class="dim">moesaic {__version__}</p></main></body></html>
"""


def _section(section: Section) -> str:
    figures = "".join(
        f'<figure><picture><source media="(max-width:{NARROW_WINDOW}px)" srcset="{_data(figure, True)}">'
        f'<img alt="{html.escape(name)}" src="{_data(figure, False)}"></picture></figure>'
        for name, figure in section.figures.items()
    )
    title = html.escape(section.title)
    return f'<section id="{html.escape(section.slug)}"><h2>{title}</h2>{section.html}{figures}</section>'


def _data(figure: Figure, narrow: bool) -> str:
    return f"data:image/png;base64,{base64.b64encode(figure_png(figure, narrow=narrow)).decode()}"


def write_report(path: Path, title: str, note: str, sections: list[Section]) -> list[Path]:
    """Write the page to ``path`` and each figure beside it as ``<stem>-<section>-<figure>.png``, each whole or not.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: ``path`` does not end in .html, or its folder does not exist.
    """
    if path.suffix.lower() != ".html":
        raise ValueError(f"the report's path must end in .html, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"the report's folder {path.parent} does not exist: create it first")
    written = [path]
    for section in sections:
        for name, figure in section.figures.items():
            picture = path.with_name(f"{path.stem}-{section.slug}-{name}.png")
            with atomic_file(picture) as file:
                file.write(figure_png(figure))
            written.append(picture)
    with atomic_file(path) as file:
        file.write(render_page(title, note, sections).encode())
    return written
