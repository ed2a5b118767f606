"""Scoring with teacher servers: real processes, real HTTP, real kills."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import urllib3
from tiny import SPECIAL, WORDS, make_model, make_rows, make_tokenizer, make_trainer, metric

from crop_trl.retries import Transient
from crop_trl.scoring import Scorer, server
from crop_trl.scoring.server import ServerScorer, TeacherServerError

from .scripted_teacher import distribution

PROGRAM = Path(__file__).with_name("scripted_teacher.py")
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
COMPLETIONS = [[11, 12], [13, 14, 15, 16, 17], [], [3]]
K = 5
NO_HTTP = [
    "HTTP/1.1 abc you sent {key}\r\n\r\n",
    "\x16\x03 {key}\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{key}\r\n{}",
]


class Teacher:
    """A server process that can be told to go wrong, killed and started again at the same port."""

    def __init__(self, *arguments: str):
        self.arguments = arguments
        self.port = 0
        self.start()

    def start(self):
        command = [sys.executable, str(PROGRAM), str(self.port), *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def script(self, **state) -> int:
        """Change what it does; returns how many completions it was asked for."""
        return urllib3.request("POST", self.url + "/script", json=state).json()["completions"]

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def teachers():
    """Starts servers of a test's own, which it may kill."""
    started = []

    def start(*arguments):
        started.append(Teacher(*arguments))
        return started[-1]

    yield start
    for teacher in started:
        if teacher.process.poll() is None:
            teacher.kill()


@pytest.fixture(scope="module")
def shared():
    teacher = Teacher()
    yield teacher
    teacher.kill()


@pytest.fixture
def teacher(shared):
    """A server that several tests use one after the other, without anything that was scripted before."""
    shared.script(reset=True)
    return shared


@pytest.fixture
def all_news(monkeypatch):
    """A failure is said at once, not only when it lasts."""
    monkeypatch.setattr(server, "_NEWS_AFTER", 0.0)


def assert_right(scored, prompts=PROMPTS, completions=COMPLETIONS, k=K):
    """Against the rule by which the server makes its numbers, position by position."""
    assert scored.mask.sum(-1).tolist() == list(map(len, completions))
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t, token in enumerate(completion):
            logprobs = torch.tensor(distribution([*prompt, *completion[:t]]))
            torch.testing.assert_close(scored.logprobs[row, t], logprobs.topk(k).values, rtol=0, atol=1e-6)
            torch.testing.assert_close(logprobs[scored.token_ids[row, t].long()], scored.logprobs[row, t])
            assert len(set(scored.token_ids[row, t].tolist())) == k
            assert scored.sampled_logprobs[row, t] == pytest.approx(logprobs[token].item(), abs=1e-6)
        assert not scored.logprobs[row, len(completion) :].any()


def test_returns_what_the_server_knows(teacher):
    said = []
    scorer = ServerScorer([teacher.url + "/v1"], top_k=K, report=said.append)
    assert isinstance(scorer, Scorer)
    scored = scorer.score(PROMPTS, COMPLETIONS)
    assert scored.token_ids.shape == (4, 5, K) and scored.token_ids.dtype == torch.int32
    assert scored.logprobs.dtype == scored.sampled_logprobs.dtype == torch.float32
    assert_right(scored)
    assert scorer.stats.metrics() == {"sequences": 3.0, "tokens": 16.0, "retries": 0.0}
    assert scorer.score([], []).token_ids.shape == (0, 0, K)
    assert scorer.score([[1]], [[]]).mask.shape == (1, 0)
    assert not said


def test_work_is_spread_over_servers(teachers):
    """None answers until all have eight requests in flight."""
    several = [teachers(), teachers(), teachers()]
    for teacher in several:
        teacher.script(hold=True)
    scorer = ServerScorer([t.url for t in several], top_k=K)

    def release():
        while [t.script() for t in several] != [8, 8, 8]:
            time.sleep(0.01)
        for teacher in several:
            teacher.script(hold=False)

    threading.Thread(target=release, daemon=True).start()
    prompts, completions = [[i, 1] for i in range(30)], [[2, i] for i in range(30)]
    assert_right(scorer.score(prompts, completions), prompts, completions)
    assert sum(t.script() for t in several) == 30


def test_what_may_pass_is_asked_again(teacher, monkeypatch):
    monkeypatch.setattr(server, "_NEWS_AFTER", 60.0)  # what is over soon is no news
    states = [{"mode": mode} for mode in ("500", "503", "429", "cut", "page", "empty")]
    for state in states + [{"mode": "raw", "raw": raw} for raw in NO_HTTP]:
        said = []
        scorer = ServerScorer([teacher.url], top_k=K, report=said.append)
        teacher.script(reset=True, count=2, **state)
        assert_right(scorer.score(PROMPTS, COMPLETIONS))
        assert (scorer.stats.retries, teacher.script(), said) == (2, 5, []), state


def test_what_will_not_pass_ends_the_run_at_once(teacher, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "sk-secret-of-the-test")
    sentences = {
        "few": "row 0: it returned 4 of the 5 most likely tokens (`score_top_k`) at position 0",
        "ids": "row 0: it scored other tokens than were sent: at position 2 of prompt and response it has 49 for 3",
        "logits": "row 0: what it returned at response position 0 is no distribution over tokens",
        "no ids": "row 0: it returns no prompt_token_ids; use a server of vLLM",
        "vocabulary": "(HTTP 400: Token id 49 is out of vocabulary); serve a teacher with at least as many",
        "401": "refuses the key in $TEACHER_API_KEY (HTTP 401: no such key: [key])",
    }
    wrong = []
    for mode, sentence in sentences.items():
        scorer = ServerScorer([teacher.url], top_k=K)
        teacher.script(reset=True, mode=mode, count=100)
        with pytest.raises(ValueError) as stopped:
            # The least likely token of all comes as an extra entry, and makes the number of entries look right.
            scorer.score([[1, 2, 3]], [[distribution([1, 2, 3]).index(min(distribution([1, 2, 3]))), 12]])
        message = str(stopped.value)
        if sentence not in message or "\n" in message or teacher.url not in message or "secret" in message:
            wrong.append(message)
        if teacher.script() != 1:
            wrong.append(f"{mode}: asked {teacher.script()} times")
    assert not wrong, "\n".join(wrong)


def test_no_error_holds_the_key(teacher, monkeypatch):
    """Not even in what hangs on it, when the server repeats what it was sent."""
    monkeypatch.setenv("TEACHER_API_KEY", "sk-secret-of-the-test")
    scorer = ServerScorer([teacher.url], top_k=K)
    for raw in NO_HTTP:
        teacher.script(reset=True, count=1, mode="raw", raw=raw)
        with pytest.raises(Transient) as failed:
            scorer.servers[0].request("/v1/completions", {"prompt": [1], "prompt_logprobs": K})
        assert failed.value.__context__ is None and "secret" not in repr(failed.value)


def test_what_cannot_be_read_is_waited_for_no_longer_than_set(teacher):
    entry = "log-probabilities of another form"
    cases = [
        ({"mode": "choice", "choice": {"prompt_token_ids": 7}}, "JSON without a completion"),
        ({"mode": "choice", "choice": {"prompt_logprobs": 7}}, "JSON without a completion"),
        ({"mode": "entry", "entry": {"hello": {"logprob": -1, "rank": 1}}}, entry),
        ({"mode": "entry", "entry": {str(10**12): {"logprob": -1, "rank": 1}}}, entry),
        ({"mode": "entry", "entry": {"3": {"logprob": "x", "rank": 1}}}, entry),
        ({"mode": "entry", "entry": [1, 2]}, entry),
        ({"mode": "drip"}, "no whole answer within 0.3 s"),
        # Longer than the run waits at all.
        ({"mode": "429", "retry_after": 600}, "HTTP 429: too many requests"),
    ]
    wrong = []
    for state, reason in cases:
        scorer = ServerScorer([teacher.url], top_k=K, timeout=0.3, report=lambda message: None)
        teacher.script(reset=True, count=10**6, **state)
        with pytest.raises(TeacherServerError) as stopped:
            scorer.score([[1, 2]], [[3]])
        if reason not in str(stopped.value):
            wrong.append(f"{state}: {stopped.value}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "listed",
    [
        {"data": [{"id": 5}, {"id": ["a"]}, {"id": "toy", "max_model_len": "100"}]},
        {"data": [{"id": "toy", "max_model_len": None}]},
    ],
)
def test_a_list_of_models_of_another_form(teacher, listed):
    teacher.script(listed=listed)
    scorer = ServerScorer([teacher.url], top_k=K)
    scorer.check_length(10**6)
    assert scorer.servers[0].model == "toy"
    assert_right(scorer.score(PROMPTS, COMPLETIONS))


@pytest.mark.parametrize("url", ["http://", "http://host:99999", "http://[::1:8000", "http://a:1,http://b:2", 8000])
def test_an_address_that_is_none(url):
    with pytest.raises(ValueError, match=r"must be addresses such as http://localhost:8000/v1, got .*[\d/]"):
        ServerScorer([url])


def test_an_address_in_brackets_with_a_slash():
    with pytest.raises(ValueError, match=r"http://\[::1\]:1 does not answer \(Connection refused\)"):
        ServerScorer(["http://[::1]:1/v1/"])


def test_a_busy_server_leaves_its_work_to_the_other(teachers):
    """Retry-After is for the server that sends it, and longer than this test may take."""
    busy, free = teachers(), teachers()
    scorer = ServerScorer([busy.url, free.url], top_k=K, report=lambda message: None)
    busy.script(mode="429", retry_after=600, count=10**6)
    prompts, completions = [[i, 1] for i in range(40)], [[2, i] for i in range(40)]
    assert_right(scorer.score(prompts, completions), prompts, completions)
    # What was in flight when it said so, and none since; nor in the next step.
    asked = busy.script()
    assert asked <= 8 and free.script() == 40
    assert_right(scorer.score(prompts, completions), prompts, completions)
    assert busy.script() == asked and free.script() == 80


def test_more_entries_than_the_server_allows(teacher):
    with pytest.raises(ValueError, match="logprobs of 21, .*; start it with --max-logprobs 21, or lower `score_top_k`"):
        ServerScorer([teacher.url], top_k=21).score(PROMPTS, COMPLETIONS)


def test_refuses_another_model(teachers):
    one, other = teachers("name", "org/teacher"), teachers("name", "org/other")
    assert ServerScorer([one.url], "org/teacher").servers[0].model == "name"
    assert ServerScorer([one.url], "name").servers[0].root == "org/teacher"
    with pytest.raises(ValueError, match="serves name, not `teacher_model_name_or_path` org/third"):
        ServerScorer([one.url], "org/third")
    with pytest.raises(ValueError, match="must all serve the same model"):
        ServerScorer([one.url, other.url])
    with pytest.raises(ValueError, match=r"does not answer \(Connection refused\); start the server"):
        ServerScorer(["http://127.0.0.1:1"])
    with pytest.raises(ValueError, match="takes 100 tokens, too few .* --max-model-len 101"):
        ServerScorer([one.url]).check_length(100)
    ServerScorer([one.url]).check_length(99)


class Words:
    """A tokenizer whose ids are the words that the scripted server knows, with one changed on demand."""

    def __init__(self, changed: int | None = None):
        self.changed = changed

    def __len__(self):
        return 40

    def decode(self, ids, **kwargs):
        return "".join("other" if i == self.changed else f"w{i}" for i in ids)


def test_refuses_another_vocabulary(teacher):
    scorer = ServerScorer([teacher.url])
    scorer.check_vocabulary(Words())
    for changed in (0, 17, 39):
        with pytest.raises(ValueError, match=f"id {changed} is 'other' for the student and 'w{changed}'"):
            scorer.check_vocabulary(Words(changed))


def test_one_of_two_servers_dies(teachers, all_news):
    """Its work moves to the other, it is said once, and again when it is back."""
    stays, dies, said = teachers(), teachers(), []
    scorer = ServerScorer([stays.url, dies.url], top_k=K, requests_per_server=2, report=said.append)
    prompts, completions = [[i, 1] for i in range(40)], [[2, i] for i in range(40)]
    stays.script(hold=True)
    dies.script(mode="die", count=1)

    def release():
        dies.process.wait()
        stays.script(hold=False)

    threading.Thread(target=release, daemon=True).start()
    assert_right(scorer.score(prompts, completions), prompts, completions)
    assert scorer.stats.retries >= 1
    (message,) = said
    assert f"Teacher server {dies.url} fails since" in message and f"its work goes to {stays.url}." in message
    dies.start()
    while len(said) < 2:  # it is found again by itself
        assert_right(scorer.score(prompts[:8], completions[:8]), prompts[:8], completions[:8])
    assert f"{dies.url} answers again after" in said[1] and len(said) == 2


@pytest.mark.parametrize("root", ["toy", "org/other"])
def test_the_only_server_dies_and_comes_back(teachers, all_news, root):
    """Started again once the pause is said: training goes on, but not with another model."""
    teacher, said = teachers(), []

    def start_again(message):
        said.append(message)
        if "paused" in message:
            teacher.arguments = ("toy", root)
            teacher.start()

    scorer = ServerScorer([teacher.url], top_k=K, requests_per_server=2, report=start_again)
    prompts, completions = [[i, 1] for i in range(20)], [[2, i] for i in range(20)]
    teacher.script(mode="die", count=1)
    if root != "toy":
        with pytest.raises(ValueError, match="came back with org/other, not toy; start that"):
            scorer.score(prompts, completions)
        return
    assert_right(scorer.score(prompts, completions), prompts, completions)
    assert len(said) == 2
    assert f"Training is paused, no teacher server answers: {teacher.url} fails since" in said[0]
    assert "Start it again at the same address" in said[0] and "`teacher_server_timeout`" in said[0]
    assert f"{teacher.url} answers again after" in said[1]


def test_another_model_between_two_steps(teachers):
    teacher = teachers("name", "org/teacher")
    scorer = ServerScorer([teacher.url], top_k=K)
    assert_right(scorer.score(PROMPTS, COMPLETIONS))
    teacher.kill()
    teacher.arguments = ("name", "org/other")
    teacher.start()
    with pytest.raises(ValueError, match="came back with org/other, not org/teacher; start that"):
        scorer.score(PROMPTS, COMPLETIONS)


def test_gives_up_after_the_set_time(teachers, all_news):
    teacher, said = teachers(), []
    scorer = ServerScorer([teacher.url], top_k=K, timeout=1, report=said.append)
    teacher.kill()
    started = time.monotonic()
    with pytest.raises(TeacherServerError, match=r"after 1 s .* fails since \d\d:\d\d:\d\d \(Connection refused\)"):
        scorer.score(PROMPTS, COMPLETIONS)
    assert time.monotonic() - started >= 1
    assert len(said) == 1


@pytest.mark.parametrize("mode, reason", [("hang", "no whole answer within 0.3 s"), ("500", "HTTP 500: the engine")])
def test_a_server_that_lists_models_and_runs_none(teacher, all_news, mode, reason):
    """It answers the question whether it is there, so only the work itself tells."""
    said = []
    scorer = ServerScorer([teacher.url], top_k=K, timeout=1, answer_timeout=0.3, report=said.append)
    teacher.script(mode=mode, count=1000)
    with pytest.raises(TeacherServerError, match=reason):
        scorer.score(PROMPTS, COMPLETIONS)
    assert len(said) == 1 and "Training is paused" in said[0]


@pytest.mark.parametrize("pause", ["shortest", "longest"])
def test_a_sequence_that_no_server_can_score(teacher, monkeypatch, pause):
    """All else succeeds in between, and still it does not go on for ever, however short the pauses happen to be."""
    monkeypatch.setattr("random.uniform", lambda low, high: low if pause == "shortest" else high)
    scorer = ServerScorer([teacher.url], top_k=K, timeout=1, requests_per_server=1)
    teacher.script(poison=PROMPTS[0][0])
    with pytest.raises(TeacherServerError, match="HTTP 500"):
        scorer.score(PROMPTS, COMPLETIONS)
    teacher.script(reset=True)
    assert_right(scorer.score(PROMPTS, COMPLETIONS))


def test_address_with_a_password(teachers):
    teacher = teachers()
    scorer = ServerScorer([teacher.url.replace("://", "://me:secret@") + "/v1/"], top_k=K, timeout=0.5)
    assert_right(scorer.score(PROMPTS, COMPLETIONS))
    teacher.kill()
    with pytest.raises(TeacherServerError) as stopped:
        scorer.score(PROMPTS, COMPLETIONS)
    assert "secret" not in str(stopped.value)


def test_trains_with_a_teacher_on_a_server(teacher, tmp_path):
    settings = {"teacher": "toy", "max_prompt_length": 30, "teacher_server_urls": teacher.url, "score_top_k": K}
    with pytest.raises(ValueError, match="vocabularies differ: id 0 is '<pad>' for the student and 'w0'"):
        make_trainer(tmp_path, **settings)
    teacher.script(words=[*SPECIAL, *WORDS])
    with pytest.raises(ValueError, match="start it with --max-logprobs 21, or lower `score_top_k`"):
        make_trainer(tmp_path, **{**settings, "score_top_k": 21})
    with pytest.raises(ValueError, match="takes 100 tokens, too few for `max_prompt_length`"):
        make_trainer(tmp_path, **{**settings, "max_prompt_length": 90})
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    trainer.train()
    assert metric(trainer, "scoring/sequences") == [24.0, 24.0] and metric(trainer, "scoring/retries") == [0.0, 0.0]
    assert_right(trainer.scorers["teacher"].score(PROMPTS, COMPLETIONS))


def test_a_teacher_on_a_server_beside_one_that_is_here(teacher, tmp_path):
    teacher.script(words=[*SPECIAL, *WORDS])
    rows = make_rows(16).map(lambda row, place: {"teacher": ["far", "near"][place % 2]}, with_indices=True)
    make_model(1).save_pretrained(tmp_path / "near")
    make_tokenizer().save_pretrained(tmp_path / "near")
    named = {"far": {"model_name_or_path": "toy", "server_urls": teacher.url}, "near": str(tmp_path / "near")}
    trainer = make_trainer(tmp_path, rows=rows, teachers=named, max_prompt_length=30, score_top_k=K, max_steps=2)
    trainer.train()
    # Of two prompts one is read by each, as a whole triplet.
    for name in named:
        assert metric(trainer, f"scoring/{name}/sequences") == [12.0, 12.0]
    assert_right(trainer.scorers["far"].score(PROMPTS, COMPLETIONS))
