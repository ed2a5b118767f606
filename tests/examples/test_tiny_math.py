"""The embedded task: every record is checked by machine, so nothing in it rests on trust in the templates."""

import difflib
import importlib
import json
import re
import sys
import time
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from crop_trl.analysis.dependence import AFTER_ERROR, POSITIVE, Reference

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_math"
FILES = {"train": (640, 3), "heldout": (256, 3)}  # records, and the --alternates each file was written with


@pytest.fixture(scope="module")
def task():
    """The modules of the folder, which is no package: its scripts import each other by bare name."""
    names = ("schemas", "solutions", "problems", "tokenizer")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def problems(task):
    return task["problems"]


@pytest.fixture(scope="module")
def tokenizer(task):
    return task["tokenizer"].build_tokenizer()


def changed_spans(before: str, after: str) -> list[tuple[str, str]]:
    """The stretches of words in which two texts differ."""
    x, y = before.split(), after.split()
    opcodes = difflib.SequenceMatcher(None, x, y, autojunk=False).get_opcodes()
    return [(" ".join(x[i:j]), " ".join(y[k:m])) for tag, i, j, k, m in opcodes if tag != "equal"]


def sampled_problems(problems, n: int = 2000):
    rng = Random("tests")
    kinds = [("train", False), ("heldout", False), ("heldout", True)]
    return [problems.sample_problem(rng, *kinds[i % 3]) for i in range(n)]


def test_every_slot_stands_once_in_every_form(problems):
    for schema in problems.SCHEMAS:
        for statement in schema.statements:
            for question in schema.questions:
                slots = re.findall(r"\{(\w+)\}", f"{statement} {question}")
                for slot in (*schema.numbers, *schema.switches):
                    assert slots.count(slot) == 1, (schema.name, slot)


def test_a_number_counterfactual_changes_one_number(problems):
    rng = Random("edits")
    for problem in sampled_problems(problems):
        for slot in problem.schema.numbers:
            edited = problem.counterfactual(slot, rng, allow_held_out=True)
            if edited is None:
                continue
            ((before, after),) = changed_spans(problem.text, edited.text)
            assert before.strip(".,?:") == str(problem.values[slot])
            assert after.strip(".,?:") == str(edited.values[slot])
            assert edited.answer != problem.answer


def test_a_switch_counterfactual_changes_one_wording(problems):
    rng = Random("edits")
    for problem in sampled_problems(problems):
        for slot in problem.schema.switches:
            edited = problem.counterfactual(slot, rng, allow_held_out=True)
            if edited is None:
                continue
            # Replacing that wording, once, gives the other text: nothing else has changed.
            old, new = problem.wording(slot), edited.wording(slot)
            places = [m.start() for m in re.finditer(re.escape(old), problem.text)]
            assert edited.text in [problem.text[:i] + new + problem.text[i + len(old) :] for i in places]
            assert edited.answer != problem.answer


def test_a_paraphrase_keeps_the_problem(problems):
    rng = Random("paraphrases")
    for problem in sampled_problems(problems):
        paraphrase = problem.paraphrase(rng)
        assert paraphrase.text != problem.text
        assert paraphrase.steps == problem.steps
        assert paraphrase.form in problems.forms_of(problem.schema_index, held_out=False)
        assert all(x != y for x, y in zip(paraphrase.form, problem.form))
        assert sorted(re.findall(r"\d+", paraphrase.text)) == sorted(re.findall(r"\d+", problem.text))


def answers(task, problem, rng, slip=False, fillers=5, favourite=0):
    """A worked answer in parts, and the one with a slip."""
    values, style = problem.nouns | problem.values, task["solutions"].Style(fillers, favourite)
    return task["solutions"].solve(problem.schema, values, rng, style, slip)


def test_solutions_are_right(problems, task):
    rng = Random("solutions")
    for problem in sampled_problems(problems):
        clean, slipped = map("".join, answers(task, problem, rng, slip=True))
        assert clean.endswith(f"\\boxed{{{problem.answer}}}.")
        equations = re.findall(r"(\d+ [-+*/] \d+) = (\d+)", clean)
        assert len(equations) == len(problem.steps) + 1  # the last one is the check
        for expression, result in equations:
            assert eval(expression) == int(result)
            assert 1 <= int(result) <= 150
        assert len(changed_spans(clean, slipped)) == 1
        assert re.findall(r"\d+ [-+*/] \d+ = \d+", slipped) == [f"{e} = {r}" for e, r in equations]


def test_answers_note_every_condition_and_their_wording_none(problems, task):
    rng = Random("notes")
    for problem in sampled_problems(problems, 500):
        parts, _ = answers(task, problem, rng, fillers=rng.randrange(8), favourite=rng.randrange(4))
        wording, (notes, *_) = parts[0::2], parts[1::2]
        assert not re.search(r"\d", " ".join(wording))
        assert len(notes.split(", ")) == len(problem.values)
        for slot, value in problem.values.items():
            assert problem.wording(slot) in notes.split() or slot in problem.schema.switches, (slot, value)


def test_a_counterfactual_told_with_the_same_draws_has_the_same_words(problems, task):
    for problem in sampled_problems(problems, 500):
        for slot in problem.values:
            edited = problem.counterfactual(slot, Random("edit"), allow_held_out=True)
            if edited is None or len(edited.steps) != len(problem.steps):
                continue
            before, after = (answers(task, p, Random("draws"))[0] for p in (problem, edited))
            assert before[0::2] == after[0::2]
            assert before[1] != after[1]  # it is noted
            assert before[-1] != after[-1]


def test_misreadings_are_wrong_but_well_formed(problems, task):
    for problem in sampled_problems(problems, 500):
        number = problem.distractor[1] if problem.distractor else None
        found = task["solutions"].misreadings(problem.schema, problem.nouns | problem.values, number)
        assert set(found) == set(task["solutions"].HABITS)
        for values in (values for kind in found.values() for values in kind):
            steps = problem.schema.steps(values)
            assert task["solutions"].valid(steps)
            assert steps[-1].result != problem.answer


def test_splits_are_disjoint(problems):
    def keys(found):
        return {(p.schema.name, tuple(sorted(p.values.items()))) for p in found}

    rng = Random("splits")
    train = [problems.sample_problem(rng, "train") for _ in range(3000)]
    held = [problems.sample_problem(rng, "heldout", held_out_form=True) for _ in range(3000)]
    assert not keys(train) & keys(held)
    assert not {(p.schema_index, p.form) for p in train} & {(p.schema_index, p.form) for p in held}
    for problem in train[:500]:  # not even as a counterfactual
        for slot in problem.values:
            edited = problem.counterfactual(slot, rng, allow_held_out=False)
            assert edited is None or not edited.held_out


def test_about_a_tenth_is_held_out(problems):
    rng = Random("share")
    drawn = [problems.sample_problem(rng, "train") for _ in range(3000)]
    edited = [p.counterfactual(rng.choice(list(p.values)), rng, allow_held_out=True) for p in drawn]
    edited = [p for p in edited if p is not None]
    assert 0.07 < sum(p.held_out for p in edited) / len(edited) < 0.13


def test_records_follow_the_schema(problems):
    for split in ("train", "heldout"):
        records = list(islice(problems.generate(split, seed=1), 300))
        assert len({r["original_problem"] for r in records}) == len({r["id"] for r in records}) == 300
        for record in records:
            assert record["status"] == "strict_pass"
            assert record["triplet_complete"] and record["usable_for_training"] and record["validation_passed"]
            assert record["condition_type"] in ("number", "operation", "category")
            edits = [record, *record["alternates"]]
            assert len(edits) <= 4
            assert all(edit["counterfactual_answer"] != record["answer"] for edit in edits)
            texts = [record["paraphrase_problem"], *(edit["counterfactual_problem"] for edit in edits)]
            assert len({record["original_problem"], *texts}) == len(edits) + 2
            assert record["solution"].endswith(f"\\boxed{{{record['answer']}}}.")


def test_the_same_seed_gives_the_same_records(problems):
    def first(split, seed, alternates=3):
        return [{**r, "alternates": None} for r in islice(problems.generate(split, seed, alternates), 50)]

    assert first("train", 4) == first("train", 4)
    assert first("train", 4) == first("train", 4, alternates=0)
    assert first("train", 4) != first("train", 5)


@pytest.mark.parametrize("split", list(FILES))
def test_the_files_are_what_the_generator_writes(problems, split):
    n, alternates = FILES[split]
    lines = [json.dumps(record) + "\n" for record in islice(problems.generate(split, 0, alternates), n)]
    file = FOLDER / "data" / f"{split}.jsonl"
    assert file.read_bytes() == "".join(lines).encode()
    assert file.stat().st_size < 1_500_000


def test_the_command_writes_a_file(problems, tmp_path, monkeypatch):
    target = tmp_path / "few.jsonl"
    monkeypatch.setattr(sys, "argv", ["problems.py", "--split", "heldout", "--n", "5", "--output", str(target)])
    problems.main()
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [
        f"tiny-heldout-0-{i}" for i in range(5)
    ]


def test_thousands_of_problems_a_second(problems):
    rng = Random("speed")
    start = time.process_time()
    texts = {problems.sample_problem(rng, "train").text for _ in range(5000)}
    # Some 30,000 a second on an idle core; the limit leaves room for a slow, busy one.
    assert len(texts) / (time.process_time() - start) > 3000


def test_the_tokenizer_is_lossless_and_knows_every_word(problems, task, tokenizer):
    wrap = task["tokenizer"].wrap
    words = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z0-9]")
    rng = Random("tokens")
    for problem in sampled_problems(problems, 300):
        clean, slipped = map("".join, answers(task, problem, rng, slip=True))
        for text in (wrap(problem.text), clean):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) <= len(words.findall(text)) + 1  # one more for the newline: no word falls into bytes
        assert len(tokenizer(clean)["input_ids"]) == len(tokenizer(slipped)["input_ids"]) <= 159
    strange = 'Ünïcode 学 "quotes"\t$5.50\n\n  two spaces'
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


def test_the_chat_template(task, tokenizer):
    message = task["tokenizer"].wrap("A {problem} of \\boxed{braces}?")
    assert message == "A {problem} of \\boxed{braces}?\nGive the answer in \\boxed{}."
    chat = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == f"<|user|>{message}<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_saved_tokenizers_are_the_built_one(tokenizer):
    transformers = pytest.importorskip("transformers")
    saved = transformers.AutoTokenizer.from_pretrained(FOLDER / "models" / "student")
    assert saved.get_vocab() == tokenizer.get_vocab()
    files = [(FOLDER / "models" / name / "tokenizer.json").read_bytes() for name in ("teacher", "student")]
    assert files[0] == files[1]


def test_the_models_solve_what_their_notes_say(problems, task):
    """Greedy decoding of a few held-out problems in held-out forms: the teacher solves them, the student is weaker."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = Random("models")
    drawn = [problems.sample_problem(rng, "heldout", held_out_form=True) for _ in range(32)]
    shares = {}
    for name in ("teacher", "student"):
        tokenizer = AutoTokenizer.from_pretrained(FOLDER / "models" / name)
        model = AutoModelForCausalLM.from_pretrained(FOLDER / "models" / name, dtype=torch.float32).eval()
        chats = [[{"role": "user", "content": task["tokenizer"].wrap(p.text)}] for p in drawn]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=160,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert all("\\boxed{" in text for text in texts)
        shares[name] = sum(text.endswith(f"\\boxed{{{p.answer}}}.") for text, p in zip(texts, drawn)) / len(drawn)
    assert shares["teacher"] >= 0.95
    assert 0.15 <= shares["student"] <= 0.75


def test_changed_problems_say_what_every_token_of_a_response_depends_on(problems, task):
    """Responses as the student learns them, right or misread, in other words than the record's solution."""
    solutions, wrong = task["solutions"], 0
    for number in range(200):
        rng = Random(f"changes {number}")
        problem = problems.sample_problem(rng, "heldout")
        record = problems.make_record(problem, rng, "x", with_changes=True)
        if record is None:
            continue
        assert {c["condition"] for c in record["changes"]} == {*problem.schema.numbers, *problem.schema.switches}
        reference = Reference.of(record)
        values, style = problem.nouns | problem.values, solutions.Style(favourite=1)
        misread = solutions.misread(problem.schema, values, None, ("number", "switch")[number % 2], rng)
        right, other = (solutions.solve(problem.schema, read, Random(number), style)[0] for read in (values, misread))
        labels = reference.label_tokens(list("".join(right)))
        assert AFTER_ERROR not in labels
        # No number of a solution is the same whatever the problem says, and no word around it depends on anything.
        place = 0
        for kind, part in enumerate(right):
            numbers = {place + n for match in re.finditer(r"\d+", part) for n in range(*match.span())}
            assert all(labels[n] == POSITIVE for n in numbers)
            assert kind % 2 or not any(labels[place : place + len(part)] == POSITIVE)
            place += len(part)
        if misread == values:
            continue
        cut = (reference.label_tokens(list("".join(other))) == AFTER_ERROR).tolist().index(True)
        if len(other) != len(right):
            continue  # with another number of steps the sentences of filler stand elsewhere
        wrong += 1
        words = [re.findall(r"\d+|\w+|[-+*/]", "".join(parts)) for parts in (right, other)]
        first = next(n for n, (one, two) in enumerate(zip(*words)) if one != two)
        starts = [match.start() for match in re.finditer(r"\d+|\w+|[-+*/]", "".join(other))]
        # A number or a switch is noted before it counts, so the first wrong word is where the error begins.
        assert cut <= starts[first] and ". " not in "".join(other)[cut : starts[first]]
    assert wrong > 100
