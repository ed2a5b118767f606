"""The real `openai` client against a real server process."""

import asyncio
import time

import pytest
from triplets.running import stats
from triplets.scripted_answers import RAW_REPLIES

from crop_trl.retries import Stopped
from crop_trl.triplets.client import Client, EndpointError, RequestFailed
from crop_trl.triplets.prompts import load_templates
from crop_trl.triplets.settings import TripletSettings

KEY = "sk-test-0123456789abcdef"


def settings(url, **changes):
    return TripletSettings(base_url=url, **({"timeout": 60.0, "max_retries": 3, "max_backoff": 0.2} | changes))


async def ask(client, problem="Add 2 and 3."):
    templates = load_templates()
    messages = templates.generator_messages(problem, 3)
    return await client.complete(messages, "generator", templates.domain.schemas["generator"])


def run(url, *problems, known_mode=None, **changes):
    async def work():
        async with Client(settings(url, **changes), known_mode) as client:
            return client, await asyncio.gather(*(ask(client, p) for p in problems), return_exceptions=True)

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ((), "json_schema"),
        (("--no-json-schema",), "json_object"),
        (("--json-schema-500",), "json_object"),
        (("--json-schema-500", "--no-json-mode"), "text"),
        (("--no-json-schema", "--no-json-mode"), "text"),
    ],
)
def test_how_json_is_asked_for_is_found_once(start_server, options, mode):
    client, answers = run(start_server(*options), *(f"[plan:good] {n}" for n in range(5)))
    assert client.mode == mode
    assert {answer.mode for answer in answers} == {mode}
    assert all(answer.usage["prompt_tokens"] > 0 and answer.content for answer in answers)


def test_a_known_mode_is_tried_first(start_server):
    client, (answer,) = run(start_server(), "[plan:good]", known_mode="json_object")
    assert client.mode == answer.mode == "json_object"
    client, (answer,) = run(start_server("--no-json-schema", "--no-json-mode"), "[plan:good]", known_mode="json_object")
    assert client.mode == "text"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("http_429", "rate_limit"),
        ("http_500", "http_500"),
        ("http_503", "http_503"),
        ("http_html", "no_completion"),
        ("http_no_choices", "no_completion"),
        ("http_cut", "connection"),
        ("http_hang", "timeout"),
        ("http_drip", "timeout"),
        ("http_error", "broken_off"),
        ("http_abort", "broken_off"),
    ],
)
def test_passing_faults_are_repeated(start_server, fault, cause):
    limits = {"timeout": 0.7, "max_retries": 50} if cause == "timeout" else {}
    client, (first, answer) = run(start_server(), "[plan:good]", f"[plan:{fault}]", **limits)
    assert answer.content.startswith('{"decision"'), answer
    if cause == "timeout":  # on a slow machine others may take as long
        assert client.retries.keys() == {cause}
    else:
        assert client.retries == {cause: 1}


def without_key(error: BaseException) -> bool:
    """Whether neither an exception nor what hangs on it shows the key."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return not any(KEY in text or KEY[3:] in text for e in seen for text in (repr(e), str(e), repr(vars(e))))


def test_what_is_no_http_is_repeated_and_shows_no_key(start_server):
    url, wrong = start_server(), []
    for fault in RAW_REPLIES:
        client, (_, answer) = run(url, "[plan:good]", f"[plan:http_{fault}]", response_format="json_schema")
        if not getattr(answer, "content", None) or client.retries.total() != 1:
            wrong.append(f"{fault}: {answer!r} after {client.retries}")
        _, (error,) = run(url, f"[plan:http_{fault}] again", response_format="json_schema", max_retries=0)
        if not isinstance(error, (RequestFailed, EndpointError)) or not without_key(error):
            wrong.append(f"{fault}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_a_server_that_stumbles_over_everything_is_asked_as_well_as_possible(start_server):
    """Two requests in each way, then all repetitions in the best one; it is not taken for a matter of the form."""
    url = start_server("--plan", "http_always_500")
    _, (error,) = run(url, "1 and 2", max_backoff=0.0, max_retries=3)
    assert isinstance(error, RequestFailed) and error.cause == "http_500"
    formats = ["json_schema"] * 2 + ["json_object"] * 2 + ["text"] * 2 + ["json_schema"] * 4
    assert stats(url)["formats"] == formats


def test_json_that_calls_itself_text_is_an_answer(start_server):
    client, (answer,) = run(start_server(), "[plan:http_plain]")
    assert answer.content.startswith('{"decision"') and not client.retries


def test_retry_after_is_honoured_and_shown(start_server, monkeypatch):
    said = []
    monkeypatch.setattr("crop_trl.retries.say", said.append)
    started = time.monotonic()
    run(start_server("--retry-after", "1.2"), *(f"[plan:http_429] {n}" for n in range(4)), max_backoff=0.0)
    assert time.monotonic() - started > 1.2
    assert said == ["Waiting 1 s until requests are sent again (HTTP 429: Rate limit reached)."]  # once for all


def test_a_refused_request_is_not_repeated(start_server):
    client, answers = run(start_server(), "[plan:http_400]", "[plan:good]")
    assert isinstance(answers[0], RequestFailed) and "flagged" in str(answers[0])
    assert answers[1].content and not client.retries


def test_endpoint_errors_name_the_remedy(start_server):
    _, (error,) = run(start_server("--key", "another"), "[plan:good]")
    assert isinstance(error, EndpointError) and "$OPENAI_API_KEY" in str(error)
    assert KEY not in str(error)  # the server repeats it
    _, (error,) = run(start_server("--model", "other"), "[plan:good]")
    assert isinstance(error, EndpointError) and "`model`" in str(error) and "does not exist" in str(error)
    _, (error,) = run("http://127.0.0.1:9/v1", "[plan:good]")
    assert isinstance(error, EndpointError) and "http://127.0.0.1:9/v1 does not answer" in str(error)


def test_an_error_that_repeats_the_key_is_cleaned(start_server):
    _, (error,) = run(start_server(), "[plan:http_500]", max_retries=0)
    assert isinstance(error, RequestFailed) and "try later" in str(error)
    assert KEY not in str(error) and "[key]" in str(error)


def test_stopping_ends_a_wait(start_server):
    async def work(url):
        async with Client(settings(url, max_backoff=60.0)) as client:
            client.mode = "text"
            client._answered = True
            task = asyncio.create_task(ask(client))
            await asyncio.sleep(0.2)
            client.stopping.set()
            with pytest.raises(Stopped):
                await asyncio.wait_for(task, 5)

    asyncio.run(work("http://127.0.0.1:9/v1"))


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": f"b{KEY}"}], "ab[key]"),
        ([{"type": "thinking", "thinking": "hm"}, "c"], "c"),
        ([{"type": "text", "text": None}, 7], None),
        ([], None),
        ("d", "d"),
        (None, None),
    ],
)
def test_parts_of_an_answer_are_joined(content, read):
    payload = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
    assert Client(settings("http://127.0.0.1:9/v1"))._read(payload, "text").content == read


def test_no_key_is_needed_for_an_endpoint_of_ones_own(start_server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    _, (answer,) = run(start_server(), "[plan:good]")
    assert answer.content
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        TripletSettings().api_key()
