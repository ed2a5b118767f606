"""World G: that paraphrases, counterfactuals and the spans that depend on a condition are what they are said to be."""

import difflib
import importlib
import importlib.machinery
import json
import re
import sys
from fractions import Fraction
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch

from crop_trl.analysis.dependence import AFTER_ERROR, NEGATIVE, POSITIVE, Reference
from crop_trl.triplets import build_dataset

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "gsm_symbolic"

# Not importorskip: the package cannot be imported whole without its dependencies, and the world does without them.
pytestmark = pytest.mark.skipif(
    importlib.machinery.PathFinder.find_spec("reasoning_gym") is None,
    reason="needs reasoning-gym (pip install --no-deps reasoning-gym==0.1.25)",
)


@pytest.fixture(scope="module")
def modules():
    """The modules of the folder, which is no package: its scripts import each other by bare name."""
    names = ("templates", "rewordings", "wording", "world", "fine_tuning", "make_world")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def world(modules):
    return modules["world"]


@pytest.fixture(scope="module")
def problems(world):
    """Five problems of each template."""
    found = []
    for number in world.REWORDINGS:
        rng, drawn = Random(f"test {number}"), []
        while len(drawn) < 5:
            problem = world.Problem(number, world.load()[number].draw(rng))
            drawn += [problem] if problem.sound else []
        found += drawn
    return found


@pytest.fixture(scope="module")
def records(world):
    return list(islice(world.generate("train", seed=1), 75))


def words(text: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\w+|[^\w\s]", text)


def calculations(solution: str) -> list[tuple[str, str]]:
    """The plain calculations of two numbers in a solution, read without the module under test."""
    plain = re.sub(r"[$€£]|(?<=\d),(?=\d{3})", "", solution)
    return re.findall(r"(?<![-+*/x\d.%] )(?<![-+*/x\d.])(\d+ ?[-+*x] ?\d+) ?= ?(\d+)\b(?![.%]\d| ?[-+*/])", plain)


def test_the_package_is_read_without_its_dependencies_and_leaves_no_trace(modules):
    assert len(modules["templates"].load()) == 100
    assert not any(name.split(".")[0] == "reasoning_gym" for name in sys.modules)


def test_a_template_taken_apart_writes_what_the_package_writes(modules):
    templates = modules["templates"].load()
    for number in modules["world"].REWORDINGS:
        template = templates[number]
        rng, again = Random(number), Random(number)
        whole = template.generator(again, 1.0)
        written = template.write(template.draw(rng))
        assert rng.getstate() == again.getstate()
        assert written.answer == re.sub(r"\.0+$", "", whole["answer"])
        assert modules["templates"].tidy(whole["question"]) == written.question


@pytest.mark.parametrize(
    "text, sides",
    [
        ("240 shrimp / 8 shrimp/minute = 30 minutes", [(30, 30)]),
        ("She needs €12,400 x 6/100 = $744.", [(744, 744)]),
        ("so 3 apples / 2 = 1", [(Fraction(3, 2), 1)]),
        ("46% of 40 is 0.46*40 = 18 students", [(Fraction(92, 5), 18)]),
        ("360 / 1440 * 100% = 25%", [(Fraction(1, 4), Fraction(1, 4))]),
        ("The room's perimeter is 2(32+17) = 98", [(98, 98)]),
        ("has 70 + 23 + T = 93 + T = 219 toys", [(None, None), (None, 219)]),
        ("On day 2, 5 * 6 = 30 more", [(30, 30)]),
        ("David = 322 points", [(None, 322)]),
    ],
)
def test_equations_are_read_with_their_units(modules, text, sides):
    assert modules["templates"].equations(text) == sides


def test_solutions_are_right(problems):
    checked = 0
    for problem in problems:
        for calculation, result in calculations(problem.written.solution):
            assert eval(calculation.replace("x", "*")) == int(result), problem.written.solution
            checked += 1
        assert problem.answer.isdigit() and problem.answer in words(problem.written.solution)
    assert checked > len(problems)


def test_a_false_solution_is_not_sound(world):
    """The package rounds down where the values do not divide; here such values are refused."""
    values = dict(name="Mia", food="onion", peel_rate=4, batch_size=30, time_per_batch=20, total_amount=240)
    assert world.Problem(0, values).sound
    assert not world.Problem(0, {**values, "peel_rate": 7}).sound


def test_a_counterfactual_changes_one_condition_and_the_answer(world, problems):
    rng, made = Random("edits"), 0
    for problem in problems:
        for name in problem.values:
            edit = world.counterfactual(problem, name, rng)
            if edit is None:
                continue
            made += 1
            other, (start, end), new = edit
            assert problem.text[:start] + new + problem.text[end:] == other.text
            opcodes = difflib.SequenceMatcher(
                None, words(problem.text), words(other.text), autojunk=False
            ).get_opcodes()
            assert sum(tag != "equal" for tag, *_ in opcodes) == 1
            assert [n for n in problem.values if problem.values[n] != other.values[n]] == [name]
            assert other.answer != problem.answer and other.sound
            for calculation, result in calculations(other.written.solution):
                assert eval(calculation.replace("x", "*")) == int(result), other.written.solution
    assert made > 2 * len(problems)


def test_a_paraphrase_keeps_the_problem(modules, problems):
    numbers = modules["templates"].numbers
    for problem in problems:
        assert sorted(numbers(problem.paraphrase)) == sorted(numbers(problem.text))
        alike = difflib.SequenceMatcher(None, words(problem.text), words(problem.paraphrase), autojunk=False).ratio()
        assert alike < 0.85, problem.paraphrase
        named = set(re.findall(r"\{(\w+)", modules["rewordings"].REWORDINGS[problem.number]))
        missing = set(problem.values) - named - {"multiplier"}  # of template 57: always "twice"
        assert not missing


def test_a_change_of_surface_keeps_every_number(world, modules, problems):
    numbers, rng = modules["templates"].numbers, Random("surface")
    changed = [(problem, world.change_surface(problem, rng)) for problem in problems]
    found = [(problem, other) for problem, other in changed if other is not None]
    assert len(found) > 0.9 * len(problems)
    for problem, other in found:
        assert other.text != problem.text and other.answer == problem.answer
        assert numbers(other.text) == numbers(problem.text)


def test_a_misreading_is_a_sound_solution_of_another_problem(world, problems):
    rng = Random("misread")
    found = [(problem, world.misread(problem, rng)) for problem in problems]
    wrong = [(problem, other) for problem, other in found if other is not problem]
    assert len(wrong) > 0.8 * len(found)
    for problem, other in wrong:
        assert other.sound and other.answer != problem.answer
        assert len(world.changes(problem.text, other.text)) == 1


def test_the_spans_of_a_condition_change_with_it_and_the_others_do_not(world, records):
    for record in records:
        text, solution = record["original_problem"], record["solution"]
        for condition in record["conditions"]:
            assert text[slice(*condition["span"])] == condition["value"]
            for start, end in condition["solution_spans"]:
                assert re.fullmatch(r"\w[\w,.]*", solution[start:end]), solution[start:end]
        by_name = {condition["name"]: condition for condition in record["conditions"]}
        for edit in (record, *record["alternates"]):
            condition = by_name[edit["condition"]]
            assert condition["solution_spans"], "a condition that changes the answer changes the solution"
            last = max(end for _, end in condition["solution_spans"])
            assert solution[last:] == "}."  # the answer itself depends on it
            start, end = edit["counterfactual_span"]
            old, new = edit["counterfactual_description"].split(" becomes ")
            assert edit["counterfactual_problem"][start:end] == new and condition["value"] == old


def test_numbers_that_do_not_matter_have_no_span(world):
    """Template 5 says for how many weeks the sisters have collected; the answer does not need it."""
    rng = Random("weeks")
    while True:
        problem = world.Problem(5, world.load()[5].draw(rng))
        if problem.sound:
            break
    found = {c["name"]: c for c in world.conditions(problem, world.Wording(rng), rng)}
    assert found["n1"]["solution_spans"] == found["n2"]["solution_spans"] == []
    assert found["s1"]["solution_spans"] and found["goal"]["solution_spans"]


def test_splits_are_disjoint_also_as_counterfactuals(world, problems):
    counts = {split: sum(problem.split == split for problem in problems) / len(problems) for split in world.SPLITS}
    assert 0.04 < counts["validation"] < 0.17 and 0.04 < counts["test"] < 0.17
    rng = Random("splits")
    for problem in [problem for problem in problems if problem.split == "train"]:
        for name in problem.values:
            edit = world.counterfactual(problem, name, rng)
            assert edit is None or edit[0].split == "train"
    drawn = {split: {world.sample(rng, split).text for _ in range(100)} for split in world.SPLITS}
    assert not drawn["train"] & drawn["test"] and not drawn["train"] & drawn["validation"]


def test_records_are_the_trainers(records):
    dataset, report = build_dataset(records, counterfactuals=4)
    assert report.kept == len(records) == len({record["original_problem"] for record in records})
    for record, row in zip(records, dataset):
        assert row["answer"] == record["answer"] and record["solution"].endswith(f"\\boxed{{{record['answer']}}}.")
        assert len(row["counterfactual_prompts"]) == 1 + len(record["alternates"]) <= 4


def test_the_same_seed_gives_the_same_records(world, records):
    again = list(islice(world.generate("train", seed=1, alternates=0), 20))
    assert [r["original_problem"] for r in again] == [r["original_problem"] for r in records[:20]]
    assert [r["solution"] for r in again] == [r["solution"] for r in records[:20]]
    other = next(world.generate("train", seed=2))
    assert other["original_problem"] != records[0]["original_problem"]


def test_batches_hold_every_example_once_an_epoch_and_like_lengths(modules):
    lengths = [Random(i).randint(50, 250) for i in range(1000)]
    order = modules["fine_tuning"].batches(lengths, batch=16, epochs=2, seed=0)
    assert sorted(row for batch in order for row in batch) == sorted([*range(1000)] * 2)
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in order]
    assert sum(spread) / len(spread) < 20
    assert order == modules["fine_tuning"].batches(lengths, batch=16, epochs=2, seed=0)


def test_one_command_makes_records_and_models(modules, tmp_path, monkeypatch):
    """From the small embedded model, with hardly any training: that the parts fit together."""
    base = ROOT / "examples" / "tiny_math" / "models" / "student"
    sizes = ["--scale", "0.0001", "--records", "4", "--problems", "2", "--samples", "1", "--workers", "1"]
    monkeypatch.setattr(modules["make_world"], "MAX_NEW_TOKENS", 16)
    folders = ["--output", str(tmp_path), "--base", str(base)]
    monkeypatch.setattr(sys, "argv", ["make_world.py", "--device", "cpu", "--train", *folders, *sizes])
    modules["make_world"].main()
    note = json.loads((tmp_path / "world.json").read_text())
    assert 0 <= note["student"]["gap"]["right_solutions_tokens_on_conditions"] <= 1
    assert note["teacher"]["greedy"] == 0.0
    for split, n in (("train", 4), ("validation", 2), ("test", 2)):
        assert len((tmp_path / f"{split}.jsonl").read_text().splitlines()) == n
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("teacher", "student"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(tmp_path / name))
        responses = (tmp_path / f"{name}.responses.jsonl").read_text().splitlines()
        assert [json.loads(line)["id"] for line in responses] == ["gsm-test-0-0", "gsm-test-0-1"]
    # With its adapters nothing is trained, and the models are the same bit for bit.
    folders = ["--output", str(tmp_path / "again"), "--base", str(base), "--adapters", str(tmp_path / "adapters")]
    monkeypatch.setattr(sys, "argv", ["make_world.py", "--device", "cpu", *folders, *sizes])
    modules["make_world"].main()
    again = json.loads((tmp_path / "again" / "world.json").read_text())
    assert again == note and not (tmp_path / "again" / "teacher.responses.jsonl").exists()


def test_a_kept_adapter_is_what_was_trained(modules, tmp_path):
    """The checkpoint against the model with its adapter beside it, up to eight bits of the adapter's values."""
    tuning = modules["fine_tuning"]
    base = str(ROOT / "examples" / "tiny_math" / "models" / "student")
    rows = [([5 + i % 40 for i in range(j, j + 24)], 8) for j in range(32)]
    recipe = tuning.Recipe(examples=32, epochs=4, batch=8, learning_rate=5e-3)
    torch.manual_seed(0)
    trained, tokenizer = tuning.load_base(base)
    ids = torch.tensor([rows[0][0]])
    with torch.no_grad():
        before = trained(input_ids=ids).logits.log_softmax(-1)
    adapter, _ = tuning.train(trained, rows, recipe, tokenizer.pad_token_id, 0, torch.device("cpu"))
    tuning.save_adapter(adapter, tmp_path / "adapter.safetensors")
    kept, _ = tuning.load_base(base)
    tuning.put_together(kept, tmp_path / "adapter.safetensors")
    with torch.no_grad():
        wanted, found = (model(input_ids=ids).logits.float().log_softmax(-1) for model in (trained, kept))
    learned = (wanted - before).abs().mean()
    assert learned > 1 and (wanted - found).abs().mean() < 0.1 * learned


def test_changed_problems_say_what_every_token_of_a_response_depends_on(world, modules):
    """Responses as the student learns them, right or misread, in other words than the record's solution."""
    wrong = 0
    for number in range(90):
        rng = Random(f"changes {number}")
        problem = world.sample(rng, "test")
        record = world.make_record(problem, rng, "x", with_changes=True)
        if record is None:
            continue
        reference = Reference.of(record)
        own = {
            place for place, label in enumerate(reference.label_tokens(list(record["solution"]))) if label == POSITIVE
        }
        spans = {place for c in record["conditions"] for span in c["solution_spans"] for place in range(*span)}
        # A fraction has two numbers and so is no condition of the world, nor is a number that a word repeats.
        assert spans == own or (spans < own and problem.number in (38, 69))
        told, misread = modules["wording"].Wording(rng, skewed=True), world.misread(problem, rng)
        right, other = (told.tell(p.written.solution, p.answer) for p in (problem, misread))
        labels = reference.label_tokens(list(right))
        values = [right[m.start() : m.end()] for m in re.finditer(r"\d+", right) if labels[m.start()] == POSITIVE]
        solution = record["solution"]
        assert values == [solution[m.start() : m.end()] for m in re.finditer(r"\d+", solution) if m.start() in own]
        assert set(labels.tolist()) == {POSITIVE, NEGATIVE}
        if misread.answer != problem.answer:
            wrong += 1
            cut = (reference.label_tokens(list(other)) == AFTER_ERROR).tolist().index(True)
            first = next(span for span, _ in world.changes(other, right))
            assert cut == first[0]
    assert wrong > 60
