"""A mistake in settings or input is one sentence, before anything is sent."""

import pytest

from crop_trl.commands.triplets import main
from crop_trl.triplets.pipeline import generate_triplets
from crop_trl.triplets.settings import TripletSettings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--input problems.jsonl", "OPENAI_API_KEY is not set"),
        ("--input none.jsonl --base-url http://127.0.0.1:9/v1", "`input` 'none.jsonl' does not exist"),
        ("--input . --base-url http://127.0.0.1:9/v1", "`input` '.' is a folder"),
        ("--input problems.jsonl --temperature nan", "`temperature` is nan"),
        ("--input problems.jsonl --base-url http://127.0.0.1:9/v1", "does not answer"),
        ("--input problems.jsonl --base-url http://me:pw@host/v1", "`base_url` must not carry"),
        ("--output nowhere --report", "`output` 'nowhere' holds no run"),
        ("--output problems.jsonl --report", "`output` 'problems.jsonl' holds no run"),
        (
            "--input problems.jsonl --output problems.jsonl --base-url http://127.0.0.1:9/v1",
            "cannot be written (File exists)",
        ),
    ],
)
def test_one_sentence_for_each_mistake(problems, tmp_path, monkeypatch, options, says):
    problems("What is 1+1?")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(SystemExit) as ended:
        main(options.split())
    sentence = ended.value.code
    assert sentence.startswith("error: ") and len(sentence.splitlines()) == 1
    assert says in sentence and "pw" not in sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"concurrency": 0}, "`concurrency` is 0"),
        ({"threshold": 1.5}, "`threshold` is 1.5"),
        ({"response_format": "xml"}, "`response_format` is 'xml'"),
        ({"extra_body": "{"}, "`extra_body`"),
        ({"base_url": "localhost:8000"}, "`base_url` is 'localhost:8000'"),
        ({"base_url": "http://[::1"}, "`base_url` is 'http://[::1'"),
        ({"base_url": "http://host:99999/v1"}, "`base_url` is 'http://host:99999/v1'"),
        ({"model": " "}, "`model` is ' '"),
        ({"base_url": "https://h/v1?key=secret"}, "`base_url` must not carry"),
        ({"input_template": "no placeholder"}, "`input_template` must contain {problem} exactly once"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": -1.0}, "`temperature` is -1.0"),
        ({"timeout": float("inf")}, "`timeout` is inf"),
        ({"max_backoff": float("nan")}, "`max_backoff` is nan"),
        ({"max_cost": float("nan")}, "`max_cost` is nan"),
        ({"threshold": float("nan")}, "`threshold` is nan"),
        ({"extra_body": '{"model": "other"}'}, "`extra_body` may not hold 'model'; take it out"),
        ({"extra_body": '{"messages": []}'}, "`extra_body` may not hold 'messages'"),
        ({"extra_body": '{"temperature": 1}'}, "`extra_body` may not hold 'temperature'; take it out"),
        ({"extra_body": '{"stream": true}'}, "`extra_body` may not hold 'stream'"),
        ({"extra_body": '{"top_p": NaN}'}, "`extra_body`"),
        ({"engine": "gpu", "model": "m"}, "`engine` is 'gpu'; choose vllm or transformers"),
        ({"engine": "vllm"}, "`model` is 'gpt-5.1'; with `engine`, give a folder"),
        ({"engine": "vllm", "model": "m", "base_url": "http://a/v1"}, "`base_url` is 'http://a/v1'; leave it out"),
        ({"engine": "vllm", "model": "m", "extra_body": '{"seed": 1}'}, "`extra_body` is ['seed']; an engine takes"),
        ({"engine": "vllm", "model": "m", "extra_body": '{"top_p": 2}'}, "`top_p` is 2"),
        ({"engine": "vllm", "model": "m", "engine_options": "[1]"}, "`engine_options` is no JSON object"),
        ({"engine_options": "{}"}, "`engine_options` is '{}'; give `engine` too"),
        ({"rules": "letters"}, "`rules` is 'letters'; choose numbers"),
        ({"rules": "numbers", "samples": 0}, "`samples` is 0"),
        ({"extra_body": '{"a":' * 10_000}, "`extra_body`"),
        ({"timeout": 0}, "`timeout` is 0"),
        ({"price_input": -1.0, "price_output": 1.0}, "`price_input` is -1.0"),
        ({"price_input": 1.0, "price_output": float("nan")}, "`price_output` is nan"),
        ({"price_cached_input": float("inf")}, "`price_cached_input` is inf"),
    ],
)
def test_settings_are_checked_when_they_are_made(changes, says):
    with pytest.raises(ValueError) as caught:
        TripletSettings(**changes)
    assert says in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "mystery", "max_cost": 1.0}, "`max_cost` needs prices"),
        ({"price_input": 1.0}, "`price_input` and `price_output` go together"),
        ({"problem_column": "question"}, "`problem_column` 'question' is missing in row 1"),
        ({"id_column": "source"}, "gives two rows the id 's'"),
        ({"id_column": "idd"}, "`id_column` 'idd' is in no row of `input` (it has info, problem, source)"),
        ({"answer_column": "meta.answer"}, "`answer_column` 'meta.answer' is in no row of `input`"),
        (
            {"id_column": "info"},
            "`id_column` 'info' holds a dict in row 1 of `input`; name a column that holds a text or "
            "a number, such as `info.index`.",
        ),
        ({"answer_column": "info"}, "`answer_column` 'info' holds a dict in row 1"),
        ({"answer_column": "answers"}, "`answer_column` 'answers' holds a list in row 2"),
        ({"problem_column": "info"}, "`problem_column` 'info' holds a dict in row 1"),
        ({"input": []}, "`input` is empty"),
        ({"templates": "no-such-folder"}, "`templates`"),
    ],
)
def test_inputs_are_checked_before_anything_is_sent(problems, tmp_path, changes, says):
    source = problems(
        {"problem": "a", "source": "s", "info": {"index": 1}}, {"problem": "b", "source": "s", "answers": ["1", "2"]}
    )
    settings = {"input": [source], "output": str(tmp_path / "out"), "base_url": "http://127.0.0.1:9/v1"} | changes
    with pytest.raises(ValueError) as caught:
        generate_triplets(TripletSettings(**settings), progress=False)
    assert says in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["sk-secret\nline", "sk-secret key", "sk-sécret", "“sk-secret”", "sk-secret\x00"])
def test_what_can_be_no_key_is_said_and_not_shown(problems, tmp_path, monkeypatch, key):
    if "\x00" in key:
        monkeypatch.setattr("os.environ", {"OPENAI_API_KEY": key})
    else:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    settings = TripletSettings(input=[problems("1+1")], output=str(tmp_path / "out"), base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match=r"\$OPENAI_API_KEY holds something that no key has") as caught:
        generate_triplets(settings, progress=False)
    assert "cret" not in str(caught.value)
    monkeypatch.setattr("os.environ", {"OPENAI_API_KEY": " sk-good\n"})  # what a file read by a shell may leave
    assert settings.api_key() == "sk-good"
