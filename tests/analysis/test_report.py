"""The report: right numbers, one self-contained page, every token escaped, and it works in a browser."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from matplotlib.text import Text
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moesaic.analysis.report import Subject, build_sections, render_page, write_report
from moesaic.analysis.report.narrow import COLUMN, CSS_PER_INCH
from moesaic.analysis.report.page import figure_png
from moesaic.analysis.report.sections import _builders, register_section
from moesaic.analysis.statistics import parameter_count, routing_statistics
from moesaic.models import MoesaicConfig, MoesaicForCausalLM
from tests.conftest import require

NASTY = [
    "</script><script>alert(1)</script>",
    "<img src=http://example.invalid/x onerror=alert(2)>",
    "&amp;",
    "\"'>",
    "\x00",
    "\u2028",
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(1, 64, (4, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return [{"input_ids": ids[:2], "attention_mask": mask[:2]}, {"input_ids": ids[2:]}]


@pytest.fixture(scope="module")
def subject(model, batches):
    statistics = routing_statistics(model, batches, coloured=50)
    tokens = [NASTY[i % len(NASTY)] for i in range(len(statistics.token_ids_T))]
    return Subject(model, "model <b>", statistics, tokens, "a text & more")


def test_statistics_count_each_real_token_once(model, batches):
    statistics = routing_statistics(model, batches)
    real = 20 + 12 + 40
    assert statistics.tokens == real
    for layer in statistics.layers:
        assert layer.rows == real
        assert int(layer.load_E.sum()) == real * 2
        assert layer.importance_E.sum() == pytest.approx(real, rel=1e-4)  # renormalised weights sum to 1
        assert sum(layer.mean_profile()) == pytest.approx(1, rel=1e-5)
        assert 0 < layer.mean_entropy() <= torch.tensor(8.0).log().item() + 1e-6
    for low, pair in enumerate(statistics.coactivation):
        assert int(pair.sum()) == real * 4
        assert torch.equal(pair.sum(1), statistics.layers[low].load_E * 2)
        assert torch.equal(pair.sum(0), statistics.layers[low + 1].load_E * 2)


def test_statistics_do_not_depend_on_the_cut_into_batches(model):
    ids = torch.randint(1, 64, (6, 10), generator=torch.Generator().manual_seed(2))
    whole = routing_statistics(model, [{"input_ids": ids}])
    parts = routing_statistics(model, [{"input_ids": row[None]} for row in ids])
    assert whole.token_ids_T == parts.token_ids_T and whole.top_experts_LT == parts.top_experts_LT
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert torch.equal(a.load_E, b.load_E)


def test_dead_and_overloaded_experts_are_found(model, batches):
    layer = routing_statistics(model, batches).layers[0]
    layer.load_E = torch.tensor([100, 10, 10, 0, 10, 10, 10, 10])
    assert layer.dead() == [3]
    assert layer.overloaded() == [0]


def test_active_parameters_by_hand(model):
    count = parameter_count(model)
    experts = 3 * 8 * 3 * 32 * 16
    assert count.experts == experts
    assert count.total - count.active == experts * 6 // 8
    assert count.routers == 3 * 8 * 32


def test_a_token_reads_one_row_of_each_ngram_table():
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = MoesaicConfig(**sizes)
    hashed = MoesaicConfig(**sizes, ngram={"orders": [2, 3], "rows": 50})
    without, with_tables = (parameter_count(MoesaicForCausalLM(config)) for config in (plain, hashed))
    assert with_tables.total - without.total == 2 * 50 * 32
    assert with_tables.active - without.active == 2 * 32


def test_no_text_and_no_layer_are_refused(model):
    with pytest.raises(ValueError, match="no token"):
        routing_statistics(model, [])
    with pytest.raises(ValueError):
        routing_statistics(torch.nn.Linear(2, 2), [{"input_ids": torch.ones(1, 2, dtype=torch.long)}])


def test_page_escapes_every_token_and_calls_nobody(subject):
    page = render_page(subject.title, subject.source, build_sections(subject))
    assert len(page.encode()) < 3_000_000
    assert "<script>alert" not in page and "<img src=http" not in page and "model <b>" not in page
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]*)"', page) == []
    payload = json.loads(re.search(r'<script type="application/json" id="experts">(.*?)</script>', page, re.S)[1])
    assert len(payload["experts"]) == 3 and len(payload["experts"][0]) == 50


def test_sections_are_json_and_others_can_join(subject):
    json.dumps([section.data for section in build_sections(subject)], allow_nan=False)
    slugs = [section.slug for section in build_sections(subject)]
    assert slugs == ["sizes", "load", "sharpness", "coactivation", "text"]

    @register_section("guest", order=25)
    def guest(subject):
        from moesaic.analysis.report import Section

        return Section("guest", "A guest", "<p>hello</p>", {})

    try:
        assert [section.slug for section in build_sections(subject)][2] == "guest"
        with pytest.raises(ValueError, match="guest"):
            register_section("guest", order=1)(guest)
    finally:
        del _builders["guest"]


def test_report_files_are_whole_or_absent(subject, tmp_path):
    with pytest.raises(ValueError, match=r"\.html"):
        write_report(tmp_path / "report.txt", "t", "n", [])
    with pytest.raises(ValueError, match="does not exist"):
        write_report(tmp_path / "no" / "report.html", "t", "n", [])
    written = write_report(tmp_path / "report.html", "t", "n", build_sections(subject))
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert all(path.stat().st_size for path in written)
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_page_works_in_a_browser_at_phone_width(subject, tmp_path):
    chromium = require("chromium")
    from playwright.sync_api import sync_playwright

    page_path = write_report(tmp_path / "report.html", subject.title, subject.source, build_sections(subject))[0]
    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=chromium, args=[*flags, "--disable-component-update"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        problems, requests = [], []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(page_path.as_uri())
        assert problems == []
        assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("section").count() == 5
        assert page.locator("figure img").evaluate_all("all => all.every(image => image.naturalWidth > 0)")
        shown = "image => [image.naturalWidth, Math.round(image.getBoundingClientRect().width)]"
        narrow = page.locator("figure img").evaluate_all(f"all => all.map({shown})")
        # Drawn for this width at two device pixels a CSS pixel, so a text keeps its points; the border takes 2.
        assert {natural for natural, _ in narrow} == {2 * COLUMN} and {width for _, width in narrow} <= {356, 357, 358}
        page.set_viewport_size({"width": 1440, "height": 800})
        wide = f"() => [...document.images].every(image => image.complete && image.naturalWidth !== {2 * COLUMN})"
        page.wait_for_function(wide, timeout=20_000)
        page.set_viewport_size({"width": 390, "height": 800})
        spans = page.locator("#coloured span")
        assert spans.count() == 50
        assert spans.nth(0).inner_text() == NASTY[0]
        before = page.locator("#coloured").evaluate("box => [...box.children].map(e => e.title)")
        page.locator("#layer").fill("2")
        after = page.locator("#coloured").evaluate("box => [...box.children].map(e => e.title)")
        assert before == [f"expert {e}" for e in subject.statistics.top_experts_LT[0][:50]]
        assert after == [f"expert {e}" for e in subject.statistics.top_experts_LT[2][:50]]
        browser.close()


def test_narrow_figures_stack_their_panels_in_letters_that_can_be_read(subject):
    for section in build_sections(subject):
        for figure in section.figures.values():
            wide = figure_png(figure)
            assert figure_png(figure, narrow=True) != wide == figure_png(figure)  # drawn once, kept
            assert figure.get_size_inches()[0] * CSS_PER_INCH == pytest.approx(COLUMN)
            figure.draw_without_rendering()  # at the figure's own dots an inch, not the file's
            panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
            boxes = [axes.get_tightbbox() for axes in panels]
            assert all(above.y0 >= below.y1 - 1 for above, below in itertools.pairwise(boxes))
            hidden = {
                label
                for axes in figure.axes
                for axis in (axes.xaxis, axes.yaxis)
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
                for label in (tick.label1, tick.label2)
            }
            for text in figure.findobj(Text):
                if text.get_visible() and text.get_text().strip() and text not in hidden:
                    # On a phone of 320 pixels the picture is shown at 288 of 358.
                    assert text.get_fontsize() / 72 * CSS_PER_INCH * 288 / COLUMN >= 9, text
                    extent = text.get_window_extent()
                    assert extent.x0 >= figure.bbox.x0 - 1 and extent.x1 <= figure.bbox.x1 + 1, text
