"""The page in a real browser: at every width, in both schemes, with hostile or endless text, of runs, in notebooks."""

from pathlib import Path

import nbformat
import pytest
import torch
from analysis.test_heatmap import NASTY, byte_tokenizer
from tiny import make_tokenizer, make_trainer
from viewer.in_browser import SECONDS, Shown
from viewer.pages import made_up_bank, words_tokenizer

from crop_trl.viewer.page import bank_page, exported_table, run_page

pytestmark = pytest.mark.browser


def test_figures_stay_under_their_headings_however_a_table_is_scrolled(browser, tmp_path):
    bank = made_up_bank([40, 30] * 30, 90, counterfactuals=4)
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(90)), "#second=entropy")
    edges = """(() => {
        const table = [...document.querySelectorAll(arguments[0])].find(t => t.offsetParent), box = table.parentNode;
        box.scrollIntoView();
        box.scrollBy(arguments[1], arguments[1]);
        const { left, top } = box.getBoundingClientRect();
        const row = [...table.rows].find(row => row.getBoundingClientRect().top > top + 150) ?? table.rows[1];
        const [heads, cells] = [table.rows[0], row].map(r => [...r.cells].map(c => c.getBoundingClientRect()));
        const at = document.elementFromPoint(left + 3, cells[0].top + 8);
        return {
            scrolled: box.scrollLeft,
            apart: heads.map((head, n) => Math.abs(head.left - cells[n].left) + Math.abs(head.right - cells[n].right)),
            pinned: row.cells[0].contains(at) && cells[0].left - left < 3,
            held: heads[0].top - top < 3,
        };
    })()"""
    wrong = []
    try:
        for width in (390, 800, 1280):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            shown.run("(show(1), go(17))")
            if not shown.run("(p => p.scrollWidth <= p.clientWidth)(document.querySelector('#panel'))"):
                wrong.append((width, "the panel's tables are wider than it"))
            for view, table in ((1, ".entries"), (2, "#view2 table"), (3, "#list table")):
                shown.run("show(arguments[0])", view)
                found = shown.run(edges, table, 120)
                if max(found["apart"]) > 1 or not (found["pinned"] or view == 1) or not (found["held"] or view < 3):
                    wrong.append((width, table, found))
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "width": 390})
        assert shown.run(edges, "#list table", 60)["scrolled"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong, wrong


def test_light_dark_and_widths(browser, bank, tmp_path):
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    shown.run("document.querySelector('#more').open = true")
    background = "getComputedStyle(document.body).backgroundColor"
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        colours = {}
        for choice in ("auto", "light", "dark"):
            shown.find(f"#{choice}").click()
            colours[choice] = shown.run(background)
        assert colours["light"] != colours["dark"] and colours["auto"] == colours[scheme]
    try:
        for width in (360, 800, 1400):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            shown.run("go(5)")
            for n in (1, 2, 3):
                shown.run("show(arguments[0])", n)
                # Wide tables scroll in their own boxes.
                assert shown.run("document.scrollingElement.scrollWidth") <= width, (width, n)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_hostile_text_changes_nothing_but_what_is_shown(browser, tmp_path):
    evil = "<img src=x onerror=\"document.title='caught'\"></script><script>document.title='caught'</script>"
    tokenizer = byte_tokenizer(merges=[("<", "/")])
    text = "".join(NASTY).encode("utf-8", "replace").decode() + evil + "\u202eabc\u2066 🙂 ¿你好\n"
    ids = tokenizer(text)["input_ids"]
    formula = f"$\\frac{{1}}{{2}} \\text{{{evil}}}$"
    prompts = {kind: [f"{evil}\u202e{kind} {formula}"] for kind in ("original", "paraphrase", "counterfactual", "hint")}
    bank = made_up_bank([len(ids), 3], 258, rows=[{"prompts": prompts, "answer": evil}] * 2)
    bank.completion_ids[0] = torch.tensor(ids)
    bank.settings = {"dataset_name": evil}
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, tokenizer, title=f"A {evil}"))
    pieces = shown.text("#tokens").replace("⏎", "\n")
    assert evil.replace(" ", "") in pieces.replace("␣", "").replace(" ", "") and "‹202E›" in pieces and "🙂" in pieces
    assert evil in shown.text("#prompts") and "‹202E›" in shown.text("#prompts")
    assert len(shown.all("#prompts mfrac")) == 4 and evil in shown.text("#prompts mtext").replace("\xa0", " ")
    # Every entry of the vocabulary, whole characters or not, is a text that can be seen.
    assert shown.run(r"facts.vocabulary.length > 200 && facts.vocabulary.every(t => /^[^\p{C}\p{Z}]+$/u.test(t))")
    for place in range(0, len(ids), 9):
        shown.run("go(arguments[0])", place)
    for n in (2, 3, 1):
        shown.run("show(arguments[0])", n)
    assert not shown.all("img, main script") and browser.title == f"A {evil}" and not shown.complaints()


def test_an_answer_of_a_hundred_thousand_tokens(browser, tmp_path):
    bank = made_up_bank([100_000, 5], 300, top_k=2, counterfactuals=1)
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(300)))
    assert len(shown.all("#tokens .t")) == 1500 and "Tokens 1 to 1,500 of 100,000" in shown.text("#pages")
    shown.run("go(77777)")
    assert "token 77,778 of 100,000" in shown.text("#panel") and "Tokens 76,501 to 78,000" in shown.text("#pages")
    assert shown.text("#count").startswith("crop keeps 20000 of 100,000 tokens")
    shown.run("document.querySelector('#pages').scrollIntoView()")
    shown.find("#pages button:last-child").click()
    assert "Tokens 78,001 to 79,500" in shown.text("#pages")
    shown.run("show(2)")
    assert not shown.complaints()


def test_a_run_is_seen_step_by_step_and_its_budget_stays(browser, tmp_path):
    make_trainer(tmp_path / "run", selection_export_steps=1, max_steps=3).train()
    table = exported_table(tmp_path / "run")
    shown = Shown(browser, tmp_path / "page.html", run_page(table, make_tokenizer()))
    assert not shown.find("#budget").is_displayed() and "half precision" in shown.find("#frozen").text
    assert shown.mask("crop").tolist() == table.kept["crop"].tolist()
    shown.choose("step", "2")
    assert shown.run("included().length") == 8 and shown.run("answers[state.answer].step") == 2
    shown.find("#tab2").click()
    assert "8 answers" in shown.text("#view2")
    shown.choose("step", "")
    assert "crop at each step" in shown.text("#view2")
    # No teacher and student were kept: what needs them is not offered.
    assert shown.run("[...document.querySelector('#look').options].map(o => o.value)") == ["", "idle"]
    shown.run("show(1), go(0)")
    assert "score" in shown.text("#panel").lower() and not shown.complaints()


def test_the_notebooks_show_their_page(browser, tmp_path):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    for name, ready in (
        *((name, "spans.length && kept(state.method)") for name in ("crop_quickstart", "selectors_tour", "crop_colab")),
        ("make_triplets", "document.querySelector('article.current')"),
    ):
        notebook = nbformat.read(Path(__file__).parents[2] / f"notebooks/{name}.ipynb", as_version=4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        (frame,) = [o.data["text/html"] for o in outputs if "srcdoc" in o.get("data", {}).get("text/html", "")]
        (tmp_path / "cell.html").write_text(frame)
        browser.get((tmp_path / "cell.html").as_uri())
        browser.switch_to.frame(0)
        WebDriverWait(browser, SECONDS, ignored_exceptions=[Exception]).until(
            lambda _, ready=ready: browser.execute_script(f"return {ready}")
        )
    # The last one is the review page: a key is a verdict.
    browser.find_element("css selector", "article .text").click()
    ActionChains(browser).send_keys("a").perform()
    assert browser.find_element("id", "progress").text == "1 of 3 marked"
    assert browser.find_elements("css selector", "article mark.changed")
