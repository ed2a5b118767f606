"""Triplets without an endpoint: a real model in this process writes and solves, killed and gone on."""

import importlib.util
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny import CHAT_TEMPLATE, SPECIAL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from triplets.running import answers_in, flags, generate, records_by_id, stats

from crop_trl.commands import triplets
from crop_trl.evaluation.sampling import DecodingSettings, TransformersSampler
from crop_trl.triplets import load_triplets
from crop_trl.triplets.numbers import changes
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.report import write_report
from crop_trl.triplets.settings import TripletSettings

# What the model has learned to make of each problem: its paraphrase, and an answer by text.
PROBLEMS = {
    "passes": "what is 13 plus 6",
    "given-wrong": "what is 35 plus 8",
    "paraphrase-other": "what is 46 plus 9",
    "counterfactual-same": "what is 57 plus 4",
    "no-tags": "what is 68 plus 3",
    "no-number": "what is one plus one",
    "figure": "what is [asy] 79 [/asy] plus 5",
}
CANDIDATES = 2


def total(text: str) -> int:
    return sum(map(int, re.findall(r"\d+", text)))


def lessons() -> dict[str, str]:
    """What stands in a request, and its answer."""
    found = {}
    for name, text in PROBLEMS.items():
        reworded = "the sum of {} and {}".format(*re.findall(r"\d+", text)) if total(text) else text
        found[f"reword: {text}"] = reworded if name == "no-tags" else f"<paraphrase> {reworded} </paraphrase>"
        found[f"solve: {text}"] = rf"so \boxed{{{total(text)}}}"
        found[f"solve: {reworded}"] = rf"so \boxed{{{total(text) + (name == 'paraphrase-other')}}}"
        for change in changes(text, CANDIDATES):
            answer = total(text if name == "counterfactual-same" else change.text)
            found[f"solve: {change.text}"] = rf"so \boxed{{{answer}}}"
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model of two layers that has learned `lessons` by heart, with its tokenizer."""
    folder, asked = str(tmp_path_factory.mktemp("models") / "tiny"), lessons()
    words = dict.fromkeys(word for pair in asked.items() for text in pair for word in text.split())
    words |= dict.fromkeys(str(number) for number in range(100))
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *words])}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, chat_template=CHAT_TEMPLATE, **special)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128}  # vLLM needs such heads
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes)
    network = Qwen3ForCausalLM(config)
    texts = [f"<user> {request} <eos> <assistant> {answer} <eos>" for request, answer in asked.items()]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    inside = batch["input_ids"].eq(tokenizer.convert_tokens_to_ids("<assistant>")).cumsum(1).bool()
    labels = batch["input_ids"].masked_fill(~(inside & batch["attention_mask"].bool()), -100)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(1000):
        loss = network(**batch, labels=labels).loss
        if loss < 0.005:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def templates(tmp_path) -> str:
    """Short requests, which end in what `lessons` begin with."""
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "generator_user.txt").write_text("reword: {problem}")
    (folder / "critic_user.txt").write_text("solve: {problem}")
    return str(folder)


@pytest.fixture
def options(model, templates, problems, tmp_path) -> dict:
    rows = [
        {"id": name, "problem": text, "answer": str(total(text) + (name == "given-wrong"))}
        for name, text in PROBLEMS.items()
    ]
    del rows[0]["answer"]  # it is found by solving
    return {
        "input": problems(*rows),
        "output": str(tmp_path / "out"),
        "engine": "transformers",
        "model": model,
        "rules": "numbers",
        "templates": templates,
        "candidates": CANDIDATES,
        "samples": 3,
        "temperature": 0.0,
        "max_completion_tokens": 16,
        "concurrency": 4,
    }


VLLM_OPTIONS = '{"dtype": "float32", "enforce_eager": true, "gpu_memory_utilization": 0.3}'


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_rule_and_a_local_model_make_triplets(options, engine):
    options |= {"engine": engine} | ({"engine_options": VLLM_OPTIONS} if engine == "vllm" else {})
    result = generate_triplets(TripletSettings(**options), progress=False)
    assert result.error is None and result.requests == len(answers_in(f"{options['output']}/ledger.jsonl")) > 20
    records = records_by_id(options["output"])
    statuses = {name: record["status"] for name, record in records.items()}
    assert statuses == {
        "passes": "strict_pass",
        "given-wrong": "needs_review",
        "paraphrase-other": "needs_review",
        "counterfactual-same": "needs_review",
        "no-tags": "pending_repair",
        "no-number": "pending_repair",
        "figure": "pending_repair",
    }
    passed = records["passes"]
    assert passed["paraphrase_problem"] == "the sum of 13 and 6"
    first, second = (change.text for change in changes(PROBLEMS["passes"], CANDIDATES))
    assert {passed["counterfactual_problem"], passed["alternates"][0]["counterfactual_problem"]} == {first, second}
    assert passed["condition_type"] == "number" and "by rule" in passed["counterfactual_description"]
    critic = passed["critic"]
    assert critic["decision"] == "accept" and critic["confidence"] == critic["paraphrase_confidence"] == 1.0
    assert critic["paraphrase_reason"] == "19 in 100% of 3 solutions"
    for name in ("given-wrong", "paraphrase-other"):
        critic = records[name]["critic"]
        assert critic["paraphrase_status"] == "reject" and "0% of 0 solutions" in critic["counterfactual_reason"]
    same = records["counterfactual-same"]["critic"]
    assert (same["paraphrase_status"], same["counterfactual_status"]) == ("accept", "reject")
    dataset, report = load_triplets(f"{options['output']}/triplets.jsonl")
    assert dataset["id"] == ["passes"] and report.total == 4
    said = write_report(options["output"])
    assert "With `rules` they are shares of solutions." in said and "1 no paraphrase, 2 no number to change" in said
    # A rerun finds everything in the ledger and needs no model.
    gone = Path(options["model"]).rename(f"{options['model']}-gone")
    result = generate_triplets(TripletSettings(**options | {"threshold": 0.9}), progress=False)
    gone.rename(options["model"])
    assert (result.requests, {r["id"]: r["status"] for r in result.records}) == (0, statuses)


def test_requests_that_wait_together_are_a_batch(options, monkeypatch):
    sizes, sample = [], TransformersSampler.sample

    def counted(self, prompts, *rest):
        sizes.append(len(prompts))
        return sample(self, prompts, *rest)

    monkeypatch.setattr(TransformersSampler, "sample", counted)
    result = generate_triplets(TripletSettings(**options), progress=False)
    assert result.error is None and sum(sizes) == result.requests and 1 < max(sizes) <= 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on(options, problems, program, number):
    rows = [f"what is {n} plus {m}" for n in range(20, 26) for m in (4, 5, 6)]
    options |= {"input": problems(*rows, name="many.jsonl"), "concurrency": 1}
    ledger, process = f"{options['output']}/ledger.jsonl", program(*flags(options))
    deadline = time.monotonic() + 600
    while len(answers_in(ledger)) < 10:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 3 and "Stopping: waiting" in err and "run again to go on" in err
        assert "Traceback" not in err
    before = [entry["key"] for entry in answers_in(ledger)]
    result = generate_triplets(TripletSettings(**options | {"concurrency": 8}), progress=False)
    keys = [entry["key"] for entry in answers_in(ledger)]
    assert result.error is None and len(result.records) == len(rows)
    assert len(set(keys)) == len(keys) == len(before) + result.requests and keys[: len(before)] == before
    assert result.requests > 0


def test_a_prompt_that_is_too_long_is_a_case_of_its_own(options):
    """Without a rule: the requests of the other templates are longer than what this model reads."""
    own = {name: options[name] for name in ("input", "output", "engine", "model")}
    result = generate_triplets(TripletSettings(**own), progress=False)
    reasons = {record["rounds"][-1]["failed"].split(":")[0] for record in result.records}
    assert result.error is None and reasons == {"too_long"} and len(result.records) == len(PROBLEMS)


def test_what_an_engine_dies_of_is_one_sentence(options):
    for changed, says in (
        ({"model": "/no/such/model"}, "`engine` 'transformers' failed with `model` '/no/such/model' (ValueError: "),
        ({"engine_options": '{"no_such": 1}'}, "got an unexpected keyword argument 'no_such'"),
    ):
        result = generate_triplets(TripletSettings(**options | changed), progress=False)
        assert says in str(result.error) and len(result.records) == 2  # which ask nothing


def test_a_batch_ends_at_its_next_token_when_it_is_stopped(model):
    sampler, found = TransformersSampler(model, DecodingSettings(temperature=0.0, max_tokens=16)), {}
    for sampler.stopped in (False, True):
        sampler.sample(
            [f"solve: {PROBLEMS['passes']}"], [0], lambda _, response: found.update({sampler.stopped: response})
        )
    assert found[True].tokens == 1 < found[False].tokens


def test_a_rule_with_an_endpoint_asks_for_text(start_server, problems, tmp_path):
    folder = tmp_path / "tagged"
    folder.mkdir()
    for name in ("generator_user", "critic_user"):
        (folder / f"{name}.txt").write_text("<problem>\n{problem}\n</problem>")
    url = start_server()
    result = generate(url, problems("[plan:good] 24 and 7"), tmp_path / "out", rules="numbers", templates=str(folder))
    assert stats(url)["formats"] == ["text"] and result.requests == 1
    assert result.records[0]["rounds"][0]["flaws"] == {"generator:no_paraphrase": 1}


def test_a_dry_run_shows_what_the_rule_finds(options, program):
    out, err = program(*flags(options), "--dry-run").communicate()
    assert "solve: what is 13 plus 6" in out and changes(PROBLEMS["passes"], 1)[0].text in out, err
    assert "5 of 7 problems have a number that the rule may change, 10 counterfactuals" in out


def test_mistakes_on_the_command_line_are_one_sentence(options):
    wrong = [({"rules": "letters"}, "invalid choice: 'letters'")]
    if importlib.util.find_spec("vllm") is None:
        wrong.append(({"engine": "vllm"}, "`engine` 'vllm' needs vLLM; run `pip install 'crop-trl[vllm]'`"))
    for changed, says in wrong:
        with pytest.raises(SystemExit) as ended:
            triplets.main(flags(options | changed))
        (line,) = ended.value.code.splitlines()
        assert line.startswith("error: ") and says in line
