"""Scoring with a real vLLM server: it equals the model in this process, and survives being killed."""

import json
import threading
import time

import pytest
import torch
from tiny import make_trainer, metric
from transformers import AutoModelForCausalLM, AutoTokenizer

from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.server import ServerScorer, TeacherServerError
from crop_trl.triplets import load_triplets

from .vllm_server import VllmServer

pytestmark = pytest.mark.vllm
TEACHER = "examples/tiny_math/models/teacher"
K = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("vllm")
    started = VllmServer(tmp_path_factory.mktemp("vllm") / "log.txt", TEACHER, "--max-logprobs", str(K))
    yield started.wait()
    if started.process.poll() is None:
        started.kill()


@pytest.fixture(scope="module")
def local():
    return LocalScorer(AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval(), K, 0)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TEACHER)


@pytest.fixture(scope="module")
def responses(tokenizer):
    """Prompts of all three kinds with worked solutions, `(prompt_ids, completion_ids)`."""
    prompts, completions = [], []
    with open("examples/tiny_math/data/heldout.jsonl") as file:
        for record in [json.loads(line) for line, _ in zip(file, range(16), strict=False)]:
            for kind in ("original", "paraphrase", "counterfactual"):
                message = {"role": "user", "content": record[f"{kind}_problem"] + "\nGive the answer in \\boxed{}."}
                ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)["input_ids"]
                prompts.append(ids)
                completions.append([*tokenizer(" " + record["solution"])["input_ids"], tokenizer.eos_token_id])
    return prompts, completions


@torch.no_grad()
def exact(prompt: list[int], completion: list[int], token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens in float64, `[T, K]`."""
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float64).eval()
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, token_ids[: len(completion)].long())


def test_equals_the_model_in_this_process(server, local, tokenizer, responses):
    scorer = ServerScorer([server.url], TEACHER, K)
    scorer.check_vocabulary(tokenizer)
    remote, here = scorer.score(*responses), local.score(*responses)
    assert torch.equal(remote.mask, here.mask) and remote.mask.sum() > 1500
    torch.testing.assert_close(remote.logprobs.exp(), here.logprobs.exp(), atol=1e-5, rtol=0)
    torch.testing.assert_close(remote.sampled_logprobs.exp(), here.sampled_logprobs.exp(), atol=1e-5, rtol=0)
    # The same top K; only where two are equal to the last digits may they change places.
    assert (remote.token_ids == here.token_ids)[here.mask].float().mean() > 0.999
    same = (remote.token_ids.sort(-1).values == here.token_ids.sort(-1).values).all(-1)[here.mask]
    assert same.float().mean() > 0.999
    # A logarithm of 1e-8 has fewer digits in fp32: there the two differ by as much as either does from float64.
    gap = (remote.logprobs - here.logprobs).abs().amax(-1)
    likely = gap[here.mask & (here.sampled_logprobs > -5)].max().item()
    row = int(gap.amax(-1).argmax())
    prompt, completion = responses[0][row], responses[1][row]
    errors = [
        (scored.logprobs[row, : len(completion)] - exact(prompt, completion, scored.token_ids[row])).abs().max().item()
        for scored in (remote, here)
    ]
    print(f"largest gap {gap.max():.1e}, after likely tokens {likely:.1e}; from float64: {errors}")
    assert gap.max() < 1e-4 and gap.max() < 3 * max(errors)


def test_mistakes_that_the_server_tells(server, tokenizer):
    with pytest.raises(ValueError, match="prompt.logprobs.*; start it with --max-logprobs 17, or lower `score_top_k`"):
        ServerScorer([server.url], top_k=17).score([[5, 6]], [[7, 8]])
    with pytest.raises(ValueError, match=f"serves {TEACHER}, not `teacher_model_name_or_path` another"):
        ServerScorer([server.url], "another")
    scorer = ServerScorer([server.url], top_k=K)
    with pytest.raises(ValueError, match="takes 256 tokens, too few"):
        scorer.check_length(256)
    with pytest.raises(ValueError, match="out of vocabulary.*; serve a teacher with at least as many"):
        scorer.score([[5, 6]], [[7, 2000]])
    swapped = tokenizer.get_vocab()
    a, b = tokenizer.convert_ids_to_tokens([300, 301])
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["model"]["vocab"][a], spec["model"]["vocab"][b] = swapped[b], swapped[a]
    other = type(tokenizer)(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(spec)))
    with pytest.raises(ValueError, match="vocabularies differ: id 300 is"):
        scorer.check_vocabulary(other)


def train(tmp_path, tokenizer, **settings):
    template = "{problem}\nGive the answer in \\boxed{}."
    rows, _ = load_triplets("examples/tiny_math/data/train.jsonl", template=template)
    student = AutoModelForCausalLM.from_pretrained("examples/tiny_math/models/student", dtype=torch.float32)
    # With all tokens trained: near-ties in the score make a mask depend on the last digit.
    options = {
        "max_steps": 3,
        "retention_ratio": 1.0,
        "max_completion_length": 40,
        "max_prompt_length": 100,
        "learning_rate": 1e-4,
    }
    trainer = make_trainer(
        tmp_path,
        student,
        rows=rows.select(range(16)),
        tokenizer=tokenizer,
        score_top_k=K,
        **options,
        **settings,
    )
    # Loading a teacher draws random numbers, and so would change the rollouts.
    torch.manual_seed(0)
    return trainer


def test_killed_in_the_middle_of_a_step(server, tokenizer, tmp_path, capfd):
    """Training pauses, says so, goes on when the server is back, and comes to the same weights."""
    undisturbed = train(tmp_path / "a", tokenizer, teacher=TEACHER)
    undisturbed.train()
    trainer = train(tmp_path / "b", tokenizer, teacher=TEACHER, teacher_server_urls=[server.url])
    scorer = trainer.scorers["teacher"]
    inner, calls = scorer.score, []

    def interrupt():
        before = scorer.stats.sequences
        while scorer.stats.sequences < before + 3:
            time.sleep(0.001)
        server.kill()
        time.sleep(3)
        server.start()

    def score(*arguments):
        calls.append(len(arguments[0]))
        if len(calls) == 2:
            threading.Thread(target=interrupt, daemon=True).start()
        return inner(*arguments)

    scorer.score = score
    trainer.train()
    said = capfd.readouterr().err
    assert said.count("Training is paused, no teacher server answers: " + server.url.removesuffix("/v1")) >= 1
    assert said.count("answers again after") == 1
    assert metric(trainer, "scoring/retries")[1] >= 1 and metric(trainer, "scoring/sequences") == [24.0] * 3
    for name in ("loss", "selection/selected_tokens", "distillation/gap_kept"):
        assert metric(trainer, name) == pytest.approx(metric(undisturbed, name), abs=1e-5)
    for a, b in zip(trainer.model.parameters(), undisturbed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_killed_for_good(server, tokenizer, tmp_path):
    """The last test: it leaves no server."""
    server.wait()
    trainer = train(tmp_path, tokenizer, teacher=TEACHER, teacher_server_urls=[server.url], teacher_server_timeout=8)
    server.kill()
    started = time.monotonic()
    with pytest.raises(TeacherServerError, match=r"after 8 s \(`teacher_server_timeout`\): .* \(Connection refused\)"):
        trainer.train()
    assert 7 < time.monotonic() - started < 30
