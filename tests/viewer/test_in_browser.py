"""The page in a real browser: it keeps what `select` keeps, and can be chosen, slid, compared, searched and typed."""

import numpy as np
import pytest
import torch
from viewer.in_browser import Shown, number
from viewer.pages import made_up_bank, words_tokenizer

from crop_trl.analysis.bank import kept_overlap
from crop_trl.analysis.category_shares import categorize_table
from crop_trl.analysis.entropy_ranks import entropy_ranks
from crop_trl.analysis.selector_bench import LabelledResponses, bench
from crop_trl.analysis.tokens import TokenTable
from crop_trl.methods import METHODS, SelectionSettings
from crop_trl.viewer import page as viewer
from crop_trl.viewer.page import bank_page

pytestmark = pytest.mark.browser


def test_at_every_budget_every_method_keeps_what_select_keeps(browser, bank, tmp_path):
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    lengths = TokenTable.from_bank(bank, ["opd"]).lengths
    real = np.arange(bank.loss_mask.size(1))[None] < lengths[:, None]
    wrong = []
    for percent in ("0.1", "0.7", "1", "5", "12.5", "20", "29", "33.3", "50", "57", "99", "100"):
        shown.run("setBudget(arguments[0])", percent)
        settings = SelectionSettings(retention_ratio=float(f"{float(percent) / 100:.6g}"))
        for name in bank.choosing_methods():
            expected = bank.select(name, settings).mask.numpy()[real]
            if not np.array_equal(shown.mask(name), expected):
                wrong.append((name, percent))
    assert not wrong and {"tied", "ruled", "random", "crop-ent", "esr"} < set(bank.choosing_methods())
    ranks = np.array(shown.run("Array.from(ranking('crop').rank)"))[: lengths[0]]
    order = np.argsort(-bank.select("crop").scores[0].numpy()[: lengths[0]], kind="stable")
    assert ranks[order].tolist() == list(range(lengths[0]))


def test_figures_over_the_batch_are_those_of_the_analyses(browser, bank, tmp_path, monkeypatch):
    settings, labels = SelectionSettings(), torch.full(bank.loss_mask.shape, -2, dtype=torch.int8)
    drawn = torch.randint(-1, 2, labels.shape, generator=torch.Generator().manual_seed(5)).to(torch.int8)
    labels = torch.where(torch.arange(labels.size(1)) < 200, drawn, labels)
    table = TokenTable.from_bank(bank, bank.choosing_methods(), settings)
    real = np.arange(labels.size(1))[None] < table.lengths[:, None]
    right = np.arange(len(labels)) % 2 == 0
    monkeypatch.setattr(viewer, "_truth", lambda rows, pieces, right: (labels.numpy()[real], [None] * len(labels)))
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400), settings))
    labelled = LabelledResponses(labels, bank.loss_mask, right, ["a"] * len(labels), [])
    rows = [r for r in bench(bank, labelled, [2], [0.2], settings) if r["responses"] == "all"]
    for row in rows:
        if row["method"] in set(METHODS) - {"ruled"}:
            truth = shown.run("found(arguments[0], included())", row["method"])
            assert truth == pytest.approx({"precision": row["precision"], "recall": row["recall"]}), row["method"]
    ranks = entropy_ranks(table, bins=10)
    categories = categorize_table(table, words_tokenizer(400))
    for name, density in zip(ranks.methods, ranks.density):
        assert shown.run("entropyBins(kept(arguments[0]), included(), 10)", name) == pytest.approx(density.tolist())
        counts = np.bincount(categories[table.kept[name]], minlength=5)
        here = shown.run("bins(kept(arguments[0]), included(), i => arrays.category[i], 5)", name)
        assert here == pytest.approx((counts / counts.sum()).tolist())
    shown.find("#tab2").click()
    names = [n for n in bank.choosing_methods() if METHODS[n].chooses]
    overlap = 100 * kept_overlap(bank, names, settings).numpy()
    marks = "[...document.querySelectorAll('#view2 tr')].map(r => r.cells[1].textContent.endsWith('no\\u00a0budget'))"
    ruled = [bank.select(name).scores is None for name in bank.choosing_methods()]
    assert shown.run(marks)[1:] == ruled and any(ruled)
    cells = "[...document.querySelectorAll('#view2 tr')].map(r => [r.cells[0].firstChild.data, r.cells[2].textContent])"
    for column, name in enumerate(names):
        shown.choose("method", name)
        (_, heading), *rows = shown.run(cells)
        both = {row: number(cell) for row, cell in rows}
        assert heading == f"also kept by {name}"
        assert [both[row] for row in names] == pytest.approx(overlap[:, column], abs=0.51)
    assert not shown.complaints()


def test_choose_slide_and_compare(browser, bank, tmp_path):
    from selenium.webdriver.common.keys import Keys

    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    assert len(shown.all("#tokens .t")) == 300 and len(shown.all("#tokens .kept")) == 60
    assert shown.text("#count") == "crop keeps 60 of 300 tokens (20\u00a0%)."
    assert "framed" in shown.text("#legend") and "underlined" not in shown.text("#legend")
    # Stripes are named where something lies below 0.
    assert "below 0" in shown.text("#legend")
    assert shown.find("#says").text.startswith("crop: How much further a changed condition moves the prediction than")
    tints = "spans.map(span => parseInt(span.style.getPropertyValue('--a')))"
    strongest = bank.select("crop").scores[bank.loss_mask].abs().max()
    assert f"darkest at {strongest:.2g}, in every answer alike" in shown.text("#legend")
    for answer in (2, 0):
        shown.run("open(arguments[0])", answer)
        scores = bank.select("crop").scores[answer, : len(shown.run("spans"))]
        assert shown.run(tints) == pytest.approx((60 * (scores.abs() / strongest).sqrt()).tolist(), abs=0.51)
    # Scores of which none is above 0 are shaded by rank.
    shown.choose("method", "first")
    assert shown.run(tints) == sorted(shown.run(tints), reverse=True) and shown.run(tints)[0] == 60
    assert "rank by first" in shown.text("#legend") and not shown.all("#tokens .minus")
    shown.choose("method", "entropy")
    assert "below 0" not in shown.text("#legend")
    # A method is not compared with itself.
    assert not shown.all("#second option[value=entropy]") and len(shown.all("#second option[value=first]")) == 1
    kept = [n for n, token in enumerate(shown.all("#tokens .t")) if "kept" in token.get_attribute("class").split()]
    assert kept == bank.select("entropy").mask[0].nonzero().ravel().tolist()
    shown.find("#budget").send_keys(Keys.ARROW_RIGHT * 3 + Keys.ARROW_LEFT)
    assert shown.find("#percent").get_attribute("value") == "22" and len(shown.all("#tokens .kept")) == 66
    shown.find("#percent").send_keys(Keys.CONTROL + "a")
    shown.find("#percent").send_keys("12.5")
    assert len(shown.all("#tokens .kept")) == 37
    shown.choose("second", "tip")
    both = (
        bank.select("tip", SelectionSettings(0.125)).mask[0] & bank.select("entropy", SelectionSettings(0.125)).mask[0]
    )
    n = int(both.sum())
    assert f"tip keeps 37; {n} are kept by both, {37 - n} by entropy alone, {37 - n} by tip alone." in shown.text(
        "#count"
    )
    assert len(shown.all("#tokens .second")) == 37 and len(shown.all("#tokens .kept.second")) == n
    shown.choose("look", "differ")
    assert len(shown.all("#tokens .t:not(.aside)")) == 2 * (37 - n)
    shown.choose("method", "tip")
    assert shown.run("[state.second, document.querySelector('#second').value]") == ["", ""]
    shown.choose("method", "entropy")
    shown.choose("second", "tip")
    # The address leads to the same view.
    again = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)), shown.run("location.hash"))
    assert len(again.all("#tokens .kept.second")) == n and again.find("#percent").get_attribute("value") == "12.5"
    assert not again.complaints()


def test_filters_and_lists(browser, bank, tmp_path):
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    mask, kept, gap = bank.loss_mask, bank.select("crop").mask, bank.gap()
    expected = {
        "missed": mask & ~kept & (gap >= 2),
        "idle": kept & (bank.select("crop").scores < 0.01),
    }
    for name, tokens in expected.items():
        shown.choose("look", name)
        found = [n for n, t in enumerate(shown.all("#tokens .t")) if "aside" not in t.get_attribute("class").split()]
        assert found == tokens[0].nonzero().ravel().tolist() and found
        some = tokens.any(1).nonzero().ravel().tolist()
        assert f"{int(tokens.sum())} in {len(some)} of 8 answers" in shown.text("#count").replace(",", "")
        shown.find("#count button").click()
        assert shown.run("state.answer") == some[1]
        shown.run("open(0)")
    shown.press("3")
    assert [row.text.split()[0] for row in shown.all("#list tr")[1:]] == list("12345678")
    heading = next(h for h in shown.all("#list th") if h.text == "Large gaps not kept ↕")
    # All of a heading sorts, its corner too.
    shown.run("(h => h.scrollIntoView())(arguments[0])", heading)
    corner = "(b => document.elementFromPoint(b.left + 2, b.top + 2))(arguments[0].getBoundingClientRect())"
    shown.run(f"{corner}.click()", heading)
    assert "below 0 where the teacher found it likelier" in shown.text("#columns")
    missed = expected["missed"].sum(1)
    listed = [int(row.text.split()[0]) - 1 for row in shown.all("#list tr")[1:]]
    assert missed[listed].tolist() == sorted(missed.tolist(), reverse=True)
    shown.all("#list tr")[2].click()
    assert shown.run("state.answer") == listed[1] and shown.find("#view1").is_displayed()


def test_the_keyboard_is_enough(browser, bank, tmp_path):
    from selenium.webdriver.common.keys import Keys

    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    kept = bank.select("crop").mask[0].nonzero().ravel().tolist()
    shown.press("n")
    assert shown.run("state.at") == kept[0] and "kept by crop" in shown.text("#panel").lower()
    shown.press("n", "n", "p")
    assert shown.run("state.at") == kept[1]
    shown.press(Keys.END, Keys.ARROW_LEFT)
    assert shown.run("state.at") == 298 and "token 299 of 300" in shown.text("#panel")
    shown.press(Keys.HOME, Keys.ARROW_DOWN)
    below, above = (shown.run("spans[arguments[0]].getBoundingClientRect().top", n) for n in (shown.run("state.at"), 0))
    assert below > above
    assert shown.run("document.activeElement === spans[state.at]")
    assert shown.run("document.activeElement.getAttribute('aria-label')").startswith("Token ")
    shown.press(Keys.ESCAPE)
    assert shown.run("state.at") == -1
    shown.press("]", "]")
    assert shown.run("state.answer") == 2 and len(shown.all("#tokens .t")) == 100
    shown.press("[")
    assert shown.run("state.answer") == 1
    shown.press("2")
    assert shown.find("#view2").is_displayed() and shown.find("#tab2").get_attribute("aria-selected") == "true"
    shown.press("3", "1", "/")
    assert shown.run("document.activeElement.id") == "search"
    # A word of the third answer alone.
    words = [set(ids[mask].tolist()) for ids, mask in zip(bank.completion_ids, bank.loss_mask)]
    word = f"w{next(n for n in words[2] if n > 99 and not any(n in other for i, other in enumerate(words) if i != 2))}"
    shown.press(word, Keys.ENTER)
    assert shown.run("state.answer") == 2
    assert {token.text for token in shown.all("#tokens .hit")} == {word}
    shown.press(Keys.ESCAPE, "3")
    assert shown.text("#found").startswith("Found in 1 of 8 answers.") and len(shown.all("#list tr")) == 2
    assert not shown.complaints()


def test_a_token_shows_what_each_reader_expected(browser, tmp_path):
    bank = made_up_bank([40, 12], 90, seed=2, flat=2.0)
    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(90)))
    shown.all("#tokens .t")[17].click()
    heads = [[cell.text for cell in row.find_elements("css selector", "th")] for row in shown.all(".entries tr")]
    kinds = ["original", "paraphrase", "counterfactual 1", "counterfactual 2"]
    assert heads == [["Prompt", "teacher", "student"], *([kind] for kind in kinds)]
    token, code = int(bank.completion_ids[0, 17]), "[...document.querySelectorAll('.entries tr')[arguments[0]].cells]"
    listed = "[...cell.children].map(one => [one.firstChild.data, one.lastChild.textContent, one.className])"
    for row, column, signal in (
        *((1, 1, "teacher/original"), (1, 2, "student/original"), (2, 2, "student/paraphrase")),
        *((4, 1, "teacher/counterfactual"), (4, 2, "student/counterfactual")),
    ):
        part = bank.signals.lists[signal][-1]
        shares = dict(zip(part.token_ids[0, 17].tolist(), (100 * part.logprobs[0, 17].exp()).tolist()))
        expected = {n: value for n, value in shares.items() if value >= 1 and n != token}
        cell = shown.run(f"{code}.map(cell => {listed})[arguments[1]]", row, column)
        others = {int(text.strip("␣w")): number(value) for text, value, said in cell if not said}
        assert list(others) == list(expected) and others == pytest.approx(expected, abs=1)
        ((text, value),) = [(text, number(value)) for text, value, said in cell if said]
        assert text.strip("␣") == f"w{token}"
        assert value == pytest.approx(100 * part.sampled_logprobs[0, 17].exp().item(), abs=0.51)
    ranked = {row.text.split()[0]: row.text.split() for row in shown.all("#panel > table tr")}
    place = bank.select("crop").scores[0].sort(descending=True, stable=True).indices.tolist().index(17) + 1
    assert int(ranked["crop"][2]) == place and ("kept" in ranked["crop"]) == bank.select("crop").mask[0, 17].item()
    assert f"gap {bank.gap()[0, 17]:.2f} nats".replace("-", "−") in shown.text("#panel")


def test_a_budget_that_is_none_is_refused_in_words(browser, bank, tmp_path):
    from selenium.webdriver.common.keys import Keys

    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    box = shown.find("#percent")
    wrong = []
    whole = "(b => b.height > 10 && b.left >= 0 && b.right <= innerWidth && b.top >= 0 && b.bottom <= innerHeight)"
    for text, used in (("0", "20"), ("-5", "20"), ("150", "15"), ("", "15"), ("100.5", "100")):
        box.send_keys(Keys.CONTROL + "a")
        box.send_keys(Keys.BACKSPACE, *text)
        said = shown.find("#refused").text
        if f"at most 100 %; {used} % is shown" not in said:
            wrong.append((text, said))
        box.send_keys(Keys.TAB)
        if (box.get_attribute("value"), shown.run("state.percent")) != (used, used):
            wrong.append((text, box.get_attribute("value"), shown.run("state.percent")))
        # It stays when one has left the box, at the foot of a page as well.
        for width in (390, 1280):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            shown.run("scrollTo(0, document.body.scrollHeight)")
            if not shown.run(f"{whole}(document.querySelector('#refused').getBoundingClientRect())"):
                wrong.append((text, width, "the message is out of sight"))
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong
    box.send_keys(Keys.CONTROL + "a")
    box.send_keys("30")
    assert not shown.find("#refused").is_displayed() and shown.run("state.percent") == "30"


def test_a_search_says_what_it_finds_in_every_view(browser, bank, tmp_path):
    from selenium.webdriver.common.keys import Keys

    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    texts = [f" w{' w'.join(map(str, ids[mask].tolist()))} " for ids, mask in zip(bank.completion_ids, bank.loss_mask)]
    word = next(f"w{n}" for n in range(100, 400) if 0 < sum(f" w{n} " in text for text in texts) < 4)
    holding = [n for n in range(8) if shown.run("textOf(arguments[0])", n).split().count(word)]
    times = shown.run("textOf(0)").split().count(word)
    assert not shown.find("#found").is_displayed()
    shown.press("/", word)
    here = f"{times} time{'s' * (times > 1)} in this one" if times else "not in this one"
    more = " Enter goes to the next." * any(holding)
    assert shown.text("#found") == f"Found in {len(holding)} of 8 answers, {here}.{more}"
    shown.press(Keys.ESCAPE, "2")
    assert f"Of what is found: {len(holding)} answer" in shown.text("#view2")
    # In a problem it is marked and counted too, across what differs in it; the counterfactual has 4 apples.
    marks = "[...CSS.highlights.get('found')].map(String)"
    shown.press("1")
    for query, expected in (("s 3 APPLES", ["s 3 apples"]), ("4 apples", []), ("p", ["p", "p"])):
        shown.run("document.querySelector('#search').value = ''")
        shown.press("/", query, Keys.ESCAPE)
        assert shown.run(marks) == expected
        times = f"{len(expected)} time{'s' * (len(expected) > 1)} in its problem"
        assert (times in shown.text("#found")) == ("found" in shown.text("#legend")) == bool(expected)
    shown.run("document.querySelector('#search').value = ''")
    shown.press("/", "nowhere")
    assert shown.find("#found").text == "Found in 0 of 8 answers."
    assert "found" not in shown.text("#legend")
    shown.press(Keys.ESCAPE, "2")
    assert shown.find("#found").is_displayed() and not shown.text("#view2")


def test_where_nothing_is_what_is_looked_for_every_token_is_pale(browser, bank, tmp_path):
    from selenium.webdriver.common.keys import Keys

    shown = Shown(browser, tmp_path / "page.html", bank_page(bank, words_tokenizer(400)))
    shown.choose("look", "missed")
    assert 0 < len(shown.all("#tokens .aside")) < 300
    shown.find("#gap").send_keys(Keys.CONTROL + "a")
    shown.find("#gap").send_keys("1000")
    assert len(shown.all("#tokens .aside")) == 300 and "0 tokens here" in shown.text("#count")
    assert "not what is looked for" in shown.text("#legend")
