"""The person's check: the page, and what comes back from it."""

import json
import re

import pytest
from triplets.running import REPORTED

from crop_trl.files import InUseError
from crop_trl.triplets.ledger import Ledger
from crop_trl.triplets.outputs import OutputDirectory
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.record import load_triplets
from crop_trl.triplets.review import apply_review, write_review_page
from crop_trl.triplets.settings import TripletSettings


def page_items(path):
    return re.findall(r'<article data-id="([^"]+)" data-hash="([^"]+)"', path.read_text())


def test_review_page_is_seeded_complete_and_safe(output):
    page = write_review_page(output, 6, seed=1)
    items = page_items(page)
    assert len(items) == 6 and page_items(write_review_page(output, 6, seed=1)) == items
    assert page_items(write_review_page(output, 6, seed=2)) != items
    assert len(page_items(write_review_page(output, 999))) == 19
    html = page.read_text()
    assert "&lt;b&gt;&amp;amp;" in html and "<b>&amp;" not in html  # the problem's own markup stays text
    assert not re.search(r'(src|href)="?https?:', html)
    assert (
        "One number differs and the problem stays sound." in html and "The critic&#39;s result is missing" not in html
    )
    assert "result is missing" in html


def test_rejections_are_applied_kept_and_taken_back(output, tmp_path, start_server, problems):
    items = dict(page_items(write_review_page(output, 999)))
    rejected, accepted, open_case = "p0000", "p0001", "p0015"

    def save(**verdicts):
        path = tmp_path / "review.json"
        rows = [{"id": i, "text_hash": items.get(i, "x"), "verdict": v, "note": "n"} for i, v in verdicts.items()]
        path.write_text(json.dumps({"verdicts": rows}))
        return path

    markdown = apply_review(
        output, save(**{rejected: "reject", accepted: "accept", open_case: "reject", "p0002": "unsure"})
    )
    # One of the two that a person rejected had not passed: 11 + 3 - 1 is 13.
    assert re.search(r"\| Rejected by a person +\| +1 \|", markdown)
    assert re.search(r"training subset\*\* +\| +13 \|", markdown)
    assert "Agreement: 2 of 3 (66.67 %), Cohen's kappa" in markdown
    assert "not defined (fewer than 10 records judged); 1 unsure" in markdown
    _, report = load_triplets(f"{output}/triplets.jsonl")
    assert report.kept == 13
    record = {r["id"]: r for r in OutputDirectory(output).load_records()}[rejected]
    assert (record["status"], record["validation_passed"], record["usable_for_training"]) == (
        "strict_pass",
        False,
        False,
    )
    assert record["human_review"]["note"] == "n"
    # A rerun of the same problems keeps the verdicts.
    settings = TripletSettings(input=[problems(*REPORTED)], output=output, base_url=start_server())
    assert generate_triplets(settings, progress=False).requests == 0
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 13
    apply_review(output, save(**{rejected: "accept"}))
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 14
    # A verdict on other texts counts for nothing, and takes the place of none on these.
    apply_review(output, save(**{rejected: "reject"}))
    items |= {accepted: "0" * 16, rejected: "0" * 16}
    markdown = apply_review(output, save(**{accepted: "reject", rejected: "accept"}))
    assert "2 verdicts on earlier texts" in markdown and "Agreement: 2 of 3" in markdown
    assert load_triplets(f"{output}/triplets.jsonl")[1].kept == 13
    assert "human_review" in {r["id"]: r for r in OutputDirectory(output).load_records()}[accepted]
    with pytest.raises(ValueError, match="1 records that `output`"):
        apply_review(output, save(nobody="reject"))


def verdicts(*notes, verdict="accept"):
    """A review file with one verdict a note, all on one record; a note is JSON."""
    head = f'{{"id": "p0000", "text_hash": "x", "verdict": "{verdict}", "note": '
    return '{"verdicts": [' + ", ".join(head + note + "}" for note in notes) + "]}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"verdicts": {}}',
        '{"verdicts": [{"id": "p0000"}]}',
        '{"verdicts": ' + "[" * 100_000,
        verdicts("[" * 900 + "]" * 900),
        verdicts('{"deep": 1}'),
        verdicts('"a"', '"b"'),
        verdicts('"a"', verdict="perhaps"),
    ],
    ids=range(10),
)
def test_what_is_no_review_is_refused(output, tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a file that the review page saved"):
        apply_review(output, path)
    with pytest.raises(ValueError, match="does not exist"):
        apply_review(output, tmp_path / "none.json")


def test_a_review_waits_for_no_run(output, tmp_path):
    path = tmp_path / "review.json"
    path.write_text('{"verdicts": []}')
    with Ledger(OutputDirectory(output).ledger), pytest.raises(InUseError, match="in use"):
        apply_review(output, path)


def test_differences_are_marked_by_word(output):
    """The counterfactual against the text that it is worded after, the paraphrase against the original."""
    directory = OutputDirectory(output)
    texts = {
        "original_problem": "Let $x = \\frac{12}{4}$. Find it.",
        "paraphrase_problem": "What is $x = \\frac{12}{4}$?",
        "counterfactual_problem": "Let $x = \\frac{13}{4}$. Find it.",
    }
    directory.save_records([record | texts for record in directory.load_records()[:1]])
    html = write_review_page(output, 1).read_text()
    # A formula is drawn, and what differs in it is marked there.
    drawn = re.sub("<math .*?</math>", "<math>", html)
    assert re.findall('class="(changed|reworded)"><mn>(.*?)</mn>', html) == [("changed", "12"), ("changed", "13")]
    assert re.findall(r'<h2>(.*?)</h2><div class="text">(.*?)</div>', drawn) == [
        ("original", "Let <math>. Find it."),
        ("paraphrase", '<mark class="reworded">What is</mark> <math><mark class="reworded">?</mark>'),
        ("counterfactual vs original", "Let <math>. Find it."),
    ]


def test_cohens_kappa_needs_verdicts_of_both_kinds(output, tmp_path):
    items = page_items(write_review_page(output, 999))
    critic = {record["id"]: record["validation_passed"] for record in OutputDirectory(output).load_records()}

    def applied(verdict):
        path = tmp_path / "review.json"
        rows = [{"id": i, "text_hash": h, "verdict": verdict(i)} for i, h in items]
        path.write_text(json.dumps({"verdicts": rows}))
        return apply_review(output, path)

    assert "Agreement: 14 of 19 (73.68 %), Cohen's kappa not defined (one side gave only" in applied(lambda i: "accept")
    assert "Agreement: 19 of 19 (100.00 %), Cohen's kappa 1.00" in applied(
        lambda i: "accept" if critic[i] else "reject"
    )
    # 4 of the critic's 14 rejected, its 5 rejected ones rejected: (15/19 - c) / (1 - c), c = (14*10 + 5*9) / 19^2.
    lost = [i for i, passed in critic.items() if passed][:4]
    assert "Agreement: 15 of 19 (78.95 %), Cohen's kappa 0.57" in applied(
        lambda i: "accept" if critic[i] and i not in lost else "reject"
    )
