"""A plan's pictures: one file with everything in it."""

from __future__ import annotations

import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from meshpar.config import ConfigError, ParallelConfig
from meshpar.planner import report
from meshpar.planner.orders import schedule_order
from meshpar.planner.pictures import MemoryRow, Picture, first_pipeline, write_html
from meshpar.planner.plots import write_png
from meshpar.planner.report import check_picture
from meshpar.planner.simulate import Timeline, simulate

CONFIG = ParallelConfig(pp=2, dp_shard=2, tp=2, schedule="ZBVZeroBubble", virtual_stages=2, microbatches=4)
ROWS = [MemoryRow(f"pp={i}", {"parameters": 3 << 30, "activations <none>": (2 - i) << 30}) for i in range(2)]


class Page(HTMLParser):
    """Counts elements by class, and fails on one that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: Counter[str] = Counter()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.classes[dict(attrs).get("class", "")] += 1
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def picture():
    forecast, measured = (
        simulate(schedule_order(CONFIG, 4), lambda *_, each=each: each, latency=0.05) for each in (0.5, 0.6)
    )
    return Picture("demo <2x2x2>", CONFIG, 4, forecast, measured, ROWS, 8 << 30)


def test_a_page_has_every_action_and_rank_and_needs_nothing_else(picture, tmp_path):
    write_html(tmp_path / "plan.html", picture)
    text = (tmp_path / "plan.html").read_text()
    page = Page(text)
    actions = sum(len(spans) for spans in picture.forecast.ranks)
    assert actions == 4 * (2 + 3 + 3 + 3)  # stage 0 has its backward in one
    assert page.classes["span"] == 2 * actions
    assert page.classes["memory"] == 4
    assert page.classes["device"] == CONFIG.world_size
    assert not any(word in text for word in ("http", "//", "src=", "href", "url(", "@import"))
    assert "Measured: " in text
    assert "5.00 GiB" in text


def test_a_page_without_memory_or_measurement(picture, tmp_path):
    write_html(tmp_path / "plan.html", Picture("demo", ParallelConfig(dp_shard=512), 8))
    page = Page((tmp_path / "plan.html").read_text())
    assert (page.classes["span"], page.classes["device"]) == (0, 32 * 8)


def test_of_all_ranks_one_pipeline_is_drawn():
    every = Timeline([[rank] for rank in range(CONFIG.world_size)])
    assert first_pipeline(every, CONFIG).ranks == [[0], [4]]


def test_a_png_or_what_it_needs(picture, tmp_path, monkeypatch):
    write_png(tmp_path / "plan.png", picture)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    check_picture(tmp_path / "plan.html")
    with pytest.raises(ConfigError, match=r'plan.png\' needs matplotlib: pip install "meshpar\[plot\]"'):
        check_picture(tmp_path / "plan.png")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "meshpar\[plot\]"'):
        write_png(tmp_path / "plan.png", picture)
