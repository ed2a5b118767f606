"""`crop-trl serve-teacher`: a real process, real HTTP, real signals."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import urllib3
from tiny import make_model, make_rows, make_tokenizer, make_trainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from crop_trl.scoring.local import LocalScorer
from crop_trl.scoring.server import ServerScorer
from crop_trl.scoring.server_http import API_KEY
from crop_trl.scoring.wire import pack_request

K = 5
KEY = "a-key-of-its-own"


def sequences(n: int, seed: int, longest: int = 30):
    """Random prompts and responses, some of which are empty."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n, 2), generator=draw).tolist()
    ids = [torch.randint(0, 20, (a + b,), generator=draw).tolist() for a, b in lengths]
    return [one[:a] for one, (a, _) in zip(ids, lengths)], [
        one[a:] if b % 7 else [] for one, (a, b) in zip(ids, lengths)
    ]


class Teacher:
    """A server in a process, which can be ended and started again at its port."""

    def __init__(self, folder, *options: str):
        self.command = [sys.executable, "-m", "crop_trl.commands", "serve-teacher", str(folder), "--dtype", "float32"]
        self.options, self.port = options, 0
        self.start()

    def start(self):
        command = [*self.command, "--port", str(self.port), *self.options]
        environment = os.environ | {API_KEY: KEY, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        lines = iter(self.process.stderr.readline, "")
        self.url = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        self.port = int(self.url.rpartition(":")[2])

    def ask(self, path: str, body: bytes | None = None, key: str = KEY):
        method = "GET" if body is None else "POST"
        return urllib3.request(method, self.url + path, body=body, headers={"Authorization": f"Bearer {key}"})

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "teacher"
    make_model(1).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def serve():
    """Starts servers, which a test may end."""
    started = []

    def start(*options):
        started.append(Teacher(*options))
        return started[-1]

    yield start
    for teacher in started:
        if teacher.process.poll() is None:
            teacher.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def served(serve, folder):
    return serve(folder, "--tokens_per_batch", "64")


@pytest.fixture
def teacher(served):
    """One for all tests, started again after a test has ended it."""
    if served.process.poll() is not None:
        served.start()
    return served


@pytest.fixture(autouse=True)
def with_key(monkeypatch):
    monkeypatch.setenv(API_KEY, KEY)


@pytest.fixture(scope="module")
def here():
    return LocalScorer(make_model(1), top_k=K, pad_token_id=0)


def assert_same(a, b):
    """But for rounding, and the order of entries that are as near as that."""
    assert torch.equal(a.mask, b.mask)
    for name in ("logprobs", "sampled_logprobs"):
        torch.testing.assert_close(getattr(b, name), getattr(a, name), rtol=0, atol=1e-5)
    near = torch.zeros_like(a.logprobs, dtype=torch.bool)
    near[..., 1:] = a.logprobs.diff() > -2e-5
    near[..., :-1] |= near[..., 1:].clone()
    near[..., -1] = True  # of the next we know nothing
    assert torch.equal(a.token_ids[~near], b.token_ids[~near]) and near[a.mask].float().mean() < 0.4


def test_it_scores_as_a_model_in_this_process(teacher, here):
    scorer = ServerScorer([teacher.url], top_k=K)
    batch = sequences(50, seed=0)
    assert_same(here.score(*batch), scorer.score(*batch))
    assert scorer.stats.metrics()["sequences"] == sum(map(bool, batch[1])) < 50
    assert (scorer.precision, scorer.ends) == ("float32", here.ends)
    scorer.check_vocabulary(make_tokenizer())


def test_many_callers_get_their_own(teacher, here):
    """Several processes ask at once, with other K; some of what is scored together is of others."""
    batches = [sequences(n, seed=n) for n in range(1, 17)]

    def ask(batch):
        return ServerScorer([teacher.url], top_k=3 + len(batch[0]) % 3).score(*batch)

    with ThreadPoolExecutor(16) as threads:
        for batch, found in zip(batches, threads.map(ask, batches)):
            assert_same(here.score(*batch, 3 + len(batch[0]) % 3), found)


def test_what_it_refuses(teacher):
    asked = {
        "no arrays": (b"{}", 400, "2 bytes that are no arrays"),
        "no ids": (pack_request([[1]], [[]], K), 400, "lengths or ids that cannot be"),
        "an unknown id": (pack_request([[1]], [[10**6]], K), 400, "vocabulary entries"),
        "too long": (pack_request([[1] * 5000], [[2]], K), 400, "a sequence of 5001 tokens"),
    }  # fmt: skip
    for what, (body, status, sentence) in asked.items():
        answer = teacher.ask("/score", body)
        assert answer.status == status and sentence in answer.json()["message"], what
    for path, body in (("/score", pack_request([[1]], [[2]], K)), ("/v1/models", None), ("/detokenize", b"{}")):
        answer = teacher.ask(path, body, key="another")
        assert answer.status == 401 and KEY not in answer.data.decode()


def test_training_goes_on_when_it_was_killed(teacher, folder, tmp_path):
    """The same student comes out as with the teacher here."""

    killed = []

    def train(name: str, **settings):
        # Batches as the server makes them.
        settings |= {"max_steps": 2, "max_prompt_length": 30, "score_tokens_per_batch": 64}
        trainer = make_trainer(tmp_path / name, rows=make_rows(8), **settings)
        scorer, score = trainer.scorers["teacher"], trainer.scorers["teacher"].score

        def killed_once(*batch):
            if name == "served" and not killed:
                killed.append(teacher.end(signal.SIGKILL))
                threading.Thread(target=teacher.start).start()
            return score(*batch)

        scorer.score = killed_once
        trainer.train()
        return trainer

    served = train("served", teacher=str(folder), teacher_server_urls=teacher.url)
    assert killed == [-signal.SIGKILL]
    resident = train("resident", teacher=str(folder))
    for (name, a), b in zip(served.model.named_parameters(), resident.model.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7, msg=name)


def test_what_has_come_in_is_answered_before_it_stops(teacher, here):
    batch, found = sequences(1500, seed=1, longest=60), []
    scorer = ServerScorer([teacher.url], top_k=K, timeout=3600)
    asking = threading.Thread(target=lambda: found.append(scorer.score(*batch)))
    asking.start()
    while not teacher.ask("/health").json()["requests"]:
        time.sleep(0.01)
    assert not found
    assert teacher.end(signal.SIGTERM) in (0, -signal.SIGTERM)
    asking.join()
    assert scorer.stats.retries == 0
    assert_same(here.score(*batch), found[0])


@pytest.mark.slow
def test_two_processes_hold_one_teacher(serve, tmp_path):
    config = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=128)
    config |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    teacher = serve(tmp_path, "--gpus", "0,1", "--tensor_parallel")
    scorer, batch = ServerScorer([teacher.url], top_k=K), sequences(20, seed=3)
    assert_same(LocalScorer(model, top_k=K, pad_token_id=0).score(*batch), scorer.score(*batch))
    with pytest.raises(ValueError, match="vocabulary entries"):
        scorer.score([[1]], [[64]])
    assert_same(LocalScorer(model, top_k=K, pad_token_id=0).score(*batch), scorer.score(*batch))
    assert teacher.end(signal.SIGTERM) in (0, signal.SIGTERM)
    # One, whose end ends the other; both at once; the process that has started them.
    for which in ("one", "both", "parent"):
        teacher.start()
        copies = psutil.Process(teacher.process.pid).children()
        killed = {"one": copies[1:], "both": copies, "parent": [teacher.process]}[which]
        subprocess.run(["kill", "-9", *(str(process.pid) for process in killed)], check=True)
        assert abs(teacher.process.wait()) == signal.SIGKILL
        assert not psutil.wait_procs(copies, timeout=60)[1]
