"""`write_page`: timelines as one page that needs nothing but a browser: no network, no other file.

The page's parts are files of their own in `page_files`; they are joined here. Its data is described in `mpk.simulate.page_data`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import jinja2

from mpk.errors import RequestError
from mpk.simulate import page_data
from mpk.simulate.timeline import Timeline

FILES = Path(__file__).parent / "page_files"
SCRIPTS = ("data.js", "raster.js", "panel.js", "search.js", "report.js", "app.js")  # each knows those before it


def write_page(timelines: Sequence[Timeline], path: Path | str, *, title: str = "", floor_ms: float | None = None) -> None:
    """Write the page of one timeline, or of two side by side (a simulated and a measured one, say), to `path`.

    `title`: heading, by default the model's architecture and the target. `floor_ms`: the least time of a step, for the ratio to it.
    Raises `RequestError` for another number of timelines or one without spans, and OSError where `path` cannot be written.
    """
    if not 1 <= len(timelines) <= 2:
        raise RequestError(f"a page of {len(timelines)} timelines", expected="one or two")
    for timeline in timelines:
        if not len(timeline.spans):
            raise RequestError(f"the {timeline.source} timeline", expected="spans", actual="none")
    graph = timelines[0].graph
    title = title or f"{graph.tensor_graph.config.architecture} on {graph.target}"
    data = page_data.build(timelines, title, floor_ms)
    blocks = "\n".join(
        f'<script type="text/plain" id="block-{key}" data-columns="{escape(json.dumps(block.columns))}">{block.text}</script>'
        for key, block in data.blocks.items())
    template = jinja2.Template((FILES / "page.html").read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text = template.render(
        title=escape(title), style=(FILES / "style.css").read_text(encoding="utf-8"), blocks=blocks,
        manifest=json.dumps(data.manifest, separators=(",", ":")).replace("<", "\\u003c"),  # nothing in it may end the script element
        script="\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS))
    Path(path).write_text(text, encoding="utf-8")
