"""The report: one page with everything in it, as text and as a real browser shows it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from gradsync.observe.timeline.advice import advise
from gradsync.observe.timeline.drawing import PALETTE
from gradsync.observe.timeline.files import write
from gradsync.observe.timeline.measures import measure
from gradsync.observe.timeline.recording import Recording
from gradsync.observe.timeline.report import html_report
from tests.support import browser
from tests.unit.timeline.made import Made

SLOW = Made(ranks=4, hosts=2, late={1: {"forward": 6.0}})
_VOID = {"meta", "br", "rect", "line"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects words and references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.references: list[str] = []
        self.elements: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in _VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(recording: Recording) -> Page:
    measures = measure(recording)
    return Page(html_report(measures, advise(measures), []))


def test_it_says_what_was_exposed_and_what_to_change(tmp_path: Path) -> None:
    write(SLOW.recording(), tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    for words in (
        "4 ranks on 2 hosts, rounds 21 to 23, 13 MiB of gradients",
        "Rank 1 on host0 holds the others up",
        "It spends 6 ms more than the others in forward.",
        "a step, median",
        "of transfers a step hidden behind backward",
        "layer3.weight … layer3.bias",
        "others waited for it",
    ):
        assert words in page.text, words
    assert page.elements.count("svg") == 1
    assert page.elements.count("tr") == 1 + 4 + 1 + 9 + 1 + 4  # ranks, phases, buckets


def test_it_needs_nothing_but_itself(tmp_path: Path) -> None:
    write(SLOW.recording(), tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.references == []
    assert not {"script", "link", "img", "iframe"} & set(page.elements)
    assert not re.search(r"url\(|@import", text)
    assert set(re.findall(r"https?://[^\"' <]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_names_are_no_markup() -> None:
    recording = Made().recording()
    evil = "<b>&\"'</b>"
    ranks = []
    for record in recording.ranks:
        module = record.modules[0]
        buckets = tuple(bucket._replace(first=evil, last=evil) for bucket in module.buckets)
        named = module._replace(name=evil, reason=evil, hook=evil, buckets=buckets)
        ranks.append(record._replace(host=evil, modules=(named,), fault=evil))
    page = page_of(recording._replace(ranks=tuple(ranks)))
    assert page.text.count(evil) >= 2 + 2 + 2 + 4


def test_what_is_missing_is_said() -> None:
    recording = Made().recording()
    first = recording.ranks[0]._replace(fault="ReplicaLostError: rank 2 was lost")
    page = page_of(Recording(3, (first, recording.ranks[1])))
    assert "rank 0 ended early: ReplicaLostError: rank 2 was lost" in page.text
    assert "no word from rank 2" in page.text


def test_clocks_and_rounds_that_were_not_kept_are_said() -> None:
    from gradsync.observe.timeline.clocks import align

    recording = align(Made(hosts=2, skew=5.0).recording())
    assert "The clock of rank 1 was aligned with rank 0's; the error is at most 2 ms" in page_of(recording).text
    assert "All ranks read the same clock" in page_of(Made().recording()).text
    module = Made().recording().ranks[0].modules[0]._replace(left_out=34)
    ranks = tuple(record._replace(modules=(module,)) for record in Made().recording().ranks)
    assert "34 earlier rounds were recorded and not kept" in page_of(Recording(2, ranks)).text


def test_without_any_round_there_is_a_page(tmp_path: Path) -> None:
    line = write(Made(rounds=0).recording(), tmp_path)
    assert line == f"trace of no round written to {tmp_path}/: report.html, trace.json"
    assert "Nothing was recorded" in Page((tmp_path / "report.html").read_text()).text


def test_the_slowest_step_has_a_picture_if_it_stands_out(tmp_path: Path) -> None:
    recording = Made(rounds=6).recording()
    ranks = [
        record._replace(spans=(*record.spans[:-1], record.spans[-1]._replace(ended_at=record.spans[-1].ended_at + 1)))
        for record in recording.ranks
    ]
    write(Recording(2, tuple(ranks)), tmp_path)
    assert "The slowest step" in Page((tmp_path / "report.html").read_text()).text


# --- in a browser -----------------------------------------------------------------------------------------

# Run in the page: what went wrong, what it has loaded, and how it is laid out.
LOOK = """<script>
const errors = []; addEventListener("error", event => errors.push(event.message));
addEventListener("load", () => {
  const box = one => { const r = one.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; };
  const found = {
    errors, loaded: performance.getEntriesByType("resource").map(one => one.name),
    wider: document.documentElement.scrollWidth - innerWidth,
    picture: box(document.querySelector(".picture svg")), bars: [...document.querySelectorAll(".ranks .bar")].map(box),
    parts: [...document.querySelectorAll(".ranks .bar i")].map(one => getComputedStyle(one).backgroundColor),
    texts: [...document.querySelectorAll("svg text")].map(one => [one.textContent, ...box(one)]),
  };
  document.body.innerHTML = ""; document.body.append(JSON.stringify(found));
});
</script></head>"""


def seen(page: Path, width: int) -> Any:
    looked = page.with_name(f"looked{width}.html")
    looked.write_text(page.read_text().replace("</head>", LOOK))
    body = re.search(r"<body>(.*)</body>", browser.dom(looked, width), re.DOTALL)
    assert body is not None
    return json.loads(body[1].replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<"))


@pytest.mark.parametrize("width", [1300, 700])
def test_a_browser_lays_it_out(tmp_path: Path, width: int) -> None:
    write(SLOW.recording(), tmp_path)
    found = seen(tmp_path / "report.html", width)
    assert found["errors"] == []
    assert found["loaded"] == []
    assert found["wider"] <= 0
    left, _, across, high = found["picture"]
    assert 0.7 * width < across < width
    assert high > 100
    assert len(found["bars"]) == 4
    assert all(bar[2] > 0.25 * width for bar in found["bars"])
    color = PALETTE["backward"].light
    assert f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})" in found["parts"]
    for text, x, _, wide, _ in found["texts"]:  # none is cut off
        assert left - 1 <= x, text
        assert x + wide <= left + across + 1, text


def test_a_browser_shows_its_colors(tmp_path: Path) -> None:
    write(SLOW.recording(), tmp_path)
    browser.screenshot(tmp_path / "report.html", tmp_path / "seen.png")
    pixels = (255 * imread(tmp_path / "seen.png")[:, :, :3]).round().astype(int)
    for name in ("forward", "backward", "ranks", "transfer", "deliver", "optimizer", "travel"):
        wanted = [int(PALETTE[name].light[at : at + 2], 16) for at in (1, 3, 5)]
        assert (abs(pixels - wanted).max(axis=2) <= 1).sum() > 50, name
    write(Made().recording(), tmp_path)
    browser.screenshot(tmp_path / "step.svg", tmp_path / "seen.png", width=1200, height=400)
    pixels = (255 * imread(tmp_path / "seen.png")[:, :, :3]).round().astype(int)
    wanted = [int(PALETTE["backward"].light[at : at + 2], 16) for at in (1, 3, 5)]
    assert (abs(pixels - wanted).max(axis=2) <= 1).sum() > 5000
