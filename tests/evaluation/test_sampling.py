"""Samplers with a real model and a real server: prompts as rendered, lengths, ends, thinking parts."""

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from crop_trl.evaluation.grading.verdict import extract_boxed
from crop_trl.evaluation.sampling import DecodingSettings, ServerSampler, TransformersSampler, VLLMSampler, render

from .server import ChatServer

STUDENT = Path(__file__).parents[2] / "examples" / "tiny_math" / "models" / "student"
PROMPTS = [
    "A baker has 12 books and buys 24 books. How many books are there now?\nGive the answer in \\boxed{}.",
    "The first shelf holds 13 books. The second shelf holds 11 books more than the first. What is the count of books "
    "for both shelves?\nGive the answer in \\boxed{}.",
]


def draw(sampler, prompts, seeds) -> list:
    out = {}
    sampler.sample(prompts, seeds, out.__setitem__)
    return [out[index] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def sampler():
    torch.set_num_threads(1)
    return TransformersSampler(str(STUDENT), DecodingSettings(max_tokens=31_744))


def test_hugging_face_ends_where_the_model_ends(sampler):
    responses = draw(sampler, PROMPTS, [1, 1])
    for response in responses:
        assert extract_boxed(response.text) and not response.truncated
        # The end token counts, and padding after it does not.
        ids = sampler.tokenizer(response.text, add_special_tokens=False)["input_ids"]
        assert response.tokens == len(ids) + 1


def test_hugging_face_draws_depend_on_prompts_and_seeds_alone(sampler):
    first = draw(sampler, PROMPTS * 4, [1] * 8)
    torch.manual_seed(99)
    assert draw(sampler, PROMPTS * 4, [1] * 8) == first
    assert draw(sampler, PROMPTS * 4, [2] * 8) != first


def test_padding_does_not_change_a_greedy_answer():
    greedy = TransformersSampler(str(STUDENT), DecodingSettings(temperature=0.0, max_tokens=80))
    assert draw(greedy, PROMPTS, [0, 0]) == [draw(greedy, [prompt], [0])[0] for prompt in PROMPTS]


def test_length_limit_is_reported():
    short = TransformersSampler(str(STUDENT), DecodingSettings(max_tokens=5))
    assert [(r.tokens, r.truncated) for r in draw(short, PROMPTS, [0, 0])] == [(5, True)] * 2


def test_prompt_longer_than_the_model_is_refused(sampler):
    with pytest.raises(ValueError, match="leaves no room in the model's 512 positions"):
        draw(sampler, ["books " * 600], [0])


def test_open_thinking_part_of_a_template_belongs_to_the_response(sampler):
    template = sampler.tokenizer.chat_template
    try:
        sampler.tokenizer.chat_template = template + "{% if enable_thinking %}{{ '<think>\n' }}{% endif %}"
        told = {
            value: DecodingSettings(chat_template_kwargs={"enable_thinking": value}, max_tokens=64)
            for value in (True, False)
        }
        assert [render(sampler.tokenizer, "p", told[value])[1] for value in (True, False)] == [True, False]
        assert not render(sampler.tokenizer, "p", DecodingSettings())[1]
        thinking = TransformersSampler.__new__(TransformersSampler)
        thinking.__dict__.update(sampler.__dict__, settings=told[True])
        (response,) = draw(thinking, PROMPTS[:1], [0])
        # Never closed: what stands in its box is no answer.
        assert response.text.startswith("<think>") and extract_boxed(response.text) is None
        plain = DecodingSettings(chat_template_kwargs={"enable_thinking": True}, conversational=False)
        assert render(sampler.tokenizer, "p", plain) == ("p", False)
        sampler.tokenizer.chat_template = None
        assert render(sampler.tokenizer, "p", told[True]) == ("p", False)
    finally:
        sampler.tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("choice", "text", "boxed"),
    [
        ({"message": {"content": "\\boxed{1}", "reasoning_content": "r"}}, "<think>r</think>\\boxed{1}", "1"),
        ({"message": {"content": "\\boxed{1}", "reasoning": "r"}}, "<think>r</think>\\boxed{1}", "1"),
        (
            {"message": {"content": None, "reasoning": "\\boxed{1}"}, "finish_reason": "length"},
            "<think>\\boxed{1}",
            None,
        ),
        ({"message": {"content": "\\boxed{1}"}}, "\\boxed{1}", "1"),
        ({"message": {"content": None}}, "", None),
    ],
)
def test_thinking_part_of_a_server(choice, text, boxed):
    server = ChatServer(lambda request: {**choice, "message": {"role": "assistant", **choice["message"]}})
    (response,) = draw(ServerSampler("toy", DecodingSettings(), server.url), ["p"], [5])
    server.close()
    assert response.text == text and extract_boxed(response.text) == boxed
    assert response.truncated is (choice.get("finish_reason") == "length")
    assert "chat_template_kwargs" not in server.requests[0]


def test_refused_key_is_explained(monkeypatch):
    from http.server import BaseHTTPRequestHandler

    def refuse(self):
        self.send_response(401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    server = ChatServer(lambda request: "x")
    handler: type[BaseHTTPRequestHandler] = server.server.RequestHandlerClass
    monkeypatch.setattr(handler, "do_GET", refuse)
    with pytest.raises(ValueError, match=r"refuses the key \(HTTP 401\); set OPENAI_API_KEY"):
        ServerSampler("toy", DecodingSettings(), server.url)
    server.close()


MESSAGE = '"message": {"role": "assistant", "content": "\\\\boxed{1}"}'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<html>Sign in</html>", "no chat completion"),
        ('{"choices": [], "usage"', "no chat completion"),
        ("[1]", "no chat completion"),
        ('{"choices": []}', "no chat completion"),
        ('{"choices": null}', "no chat completion"),
        ('{"choices": [{"index": 0}]}', "no chat completion"),
        ('{"error": {"message": "quota used up", "code": 429}}', "quota used up"),
    ],
)
def test_answers_that_are_none_are_explained(body, words):
    server = ChatServer(lambda request: body.encode())
    with pytest.raises(RuntimeError, match=words) as stopped:
        draw(ServerSampler("toy", DecodingSettings(), server.url), ["p"], [5])
    server.close()
    assert server.url in str(stopped.value) and "run the same command again" in str(stopped.value)


@pytest.mark.parametrize("usage", ["", ', "usage": null', ', "usage": {"completion_tokens": null}'])
def test_a_length_that_the_server_does_not_tell_is_unknown(usage):
    server = ChatServer(lambda request: f'{{"choices": [{{"finish_reason": "stop", {MESSAGE}}}]{usage}}}'.encode())
    (response,) = draw(ServerSampler("toy", DecodingSettings(), server.url), ["p"], [5])
    server.close()
    assert response.text == "\\boxed{1}" and response.tokens is None


def test_requests_in_flight_are_saved_when_one_fails():
    failed = threading.Event()

    class Watched(ServerSampler):
        def _ask(self, prompt, *more):
            try:
                return super()._ask(prompt, *more)
            finally:
                if prompt == "bad":
                    failed.set()

    def reply(request: dict):
        if request["messages"][0]["content"] == "bad":
            return 400
        failed.wait()
        return "late"

    server = ChatServer(reply)
    saved = {}
    with pytest.raises(RuntimeError, match="HTTP 400"):
        sampler = Watched("toy", DecodingSettings(), server.url, batch_size=2)
        sampler.sample(["slow", "bad", "never", "never"], [1, 2, 3, 4], saved.__setitem__)
    server.close()
    # Two at a time: the slow one was under way, the others had not begun.
    assert list(saved) == [0] and saved[0].text == "late" and len(server.requests) == 2


def test_requests_are_repeated_for_a_while_and_not_once_another_failed(monkeypatch, capsys):
    asked = Counter()
    busy = threading.Event()

    def reply(request: dict):
        prompt = request["messages"][0]["content"]
        asked[prompt] += 1
        if prompt == "bad":
            busy.wait()
            return 400
        if prompt == "overloaded":
            busy.set()
        return "fine" if prompt == "once" and asked[prompt] == 2 else 503

    server = ChatServer(reply)
    sampler = ServerSampler("toy", DecodingSettings(), server.url)
    assert draw(sampler, ["once"], [0])[0].text == "fine"
    # The other one waits, for an hour: it ends at once, and the sentence is of the one that failed.
    monkeypatch.setattr("crop_trl.evaluation.sampling.retry_after", lambda headers: 3600.0)
    with pytest.raises(RuntimeError, match="HTTP 400"):
        draw(sampler, ["overloaded", "bad"], [0, 0])
    monkeypatch.undo()
    monkeypatch.setattr("crop_trl.evaluation.sampling._ATTEMPTS", 2)
    with pytest.raises(
        RuntimeError, match=r"answered HTTP 503 \(.*\); what is done is saved, run the same command again"
    ):
        draw(sampler, ["down"], [0])
    server.close()
    assert asked == {"once": 2, "overloaded": 1, "bad": 1, "down": 2}
    assert "Waiting 36" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "empty folder"])
def test_a_model_that_cannot_be_loaded_is_one_sentence(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(tmp_path) if kind == "empty folder" else str(tmp_path / "nothing")
    with pytest.raises(ValueError, match="`--model` '.*' cannot be loaded") as stopped:
        TransformersSampler(model, DecodingSettings())
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"temperature": -1}, "`temperature` is -1"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"max_tokens": 0}, "`max_tokens`"),
    ],
)
def test_wrong_settings_are_explained(setting, words):
    with pytest.raises(ValueError, match=words):
        DecodingSettings(**setting)


def test_missing_vllm_names_the_other_samplers():
    pytest.importorskip("torch")
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"crop-trl\[vllm\], or take server or hf"):
            VLLMSampler(str(STUDENT), DecodingSettings())
    else:
        pytest.skip("vLLM is installed")


@pytest.mark.gpu
def test_vllm_gives_what_hugging_face_gives():
    pytest.importorskip("vllm")
    options = {"max_model_len": 256, "gpu_memory_utilization": 0.3, "dtype": "float32", "enforce_eager": True}
    greedy = DecodingSettings(temperature=0.0, max_tokens=80)
    engine = VLLMSampler(str(STUDENT), greedy, options=options)
    reference = TransformersSampler(str(STUDENT), greedy, dtype="float32")
    assert draw(engine, PROMPTS, [0, 0]) == draw(reference, PROMPTS, [0, 0])
    engine.settings = DecodingSettings(temperature=1.0, max_tokens=80)
    drawn = draw(engine, PROMPTS * 4, [1] * 8)
    # A request's draw depends on its own prompt and seed.
    assert draw(engine, PROMPTS, [1, 1]) == drawn[:2] and draw(engine, PROMPTS * 4, [2] * 8) != drawn
    engine.settings = DecodingSettings(max_tokens=5)
    assert [(r.tokens, r.truncated) for r in draw(engine, PROMPTS, [0, 0])] == [(5, True)] * 2
