"""Heat maps: decoded tokens, values, and their picture."""

import builtins
import math
import random
import re
import struct
import warnings

import pytest
import torch
from tiny import make_rows, make_tokenizer, make_trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from crop_trl.analysis.dependence import Reference
from crop_trl.analysis.heatmap import GAP, MARGIN, SEMANTIC, SURFACE, ResponseHeatmap, save_png
from crop_trl.analysis.inspect import inspect_response
from crop_trl.methods import SelectionSettings, select
from crop_trl.methods.divergence import topk_jsd
from crop_trl.text import shorten, token_pieces, visible_token, word_changes


def byte_tokenizer(merges=()):
    """Byte-level BPE, one token a byte but for the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|end|>", *alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def word_tokenizer():
    words = "<unk> <eos> take 3 and add 4 .".split()
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def made_up(n, seed=0, tokens=None, **kwargs):
    rng = random.Random(seed)
    words = [" the", " of", "3", " +", " x", "\n\n", " therefore", "$", "\\frac{1}{2}"]
    tokens = tokens or [rng.choice(words) for _ in range(n)]
    semantic, surface = ([rng.random() ** 4 * math.log(2) for _ in tokens] for _ in range(2))
    margin = [a - b for a, b in zip(semantic, surface)]
    cut = sorted(margin)[-max(1, len(tokens) // 5)]
    rows = {SEMANTIC: semantic, SURFACE: surface, MARGIN: margin}
    return ResponseHeatmap(tokens, rows, [m >= cut for m in margin], **kwargs)


PROMPTS = {
    "original": "Tom has 12 apples and buys 7 more. How many?",
    "paraphrase": "After buying 7 apples on top of his 12, how many has Tom?",
    "counterfactual": "Tom has 12 apples and buys 9 more. How many?",
}
NASTY = [
    "<script>alert(1)</script>",
    "</textarea>",
    '"onmouseover="x',
    "&amp;",
    "$x$",
    "$",
    "\x1b[31m",
    "\x00",
    "\u202e",
    "\ud800",
    "\u0301",
    "你好",
    "🙂",
    "",
    "\t",
    "\r\n",
    "\u2028",
    "\ufffd",
    "_{^\\",
    "x" * 300,
    " ",
    "BODY",
    "{0}",
    "%s",
]


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


# --- text


@pytest.mark.parametrize("text", ["a 你好 é\n\n🙂 b", "plain", "🙂", "\n", "naïve 😀😀 −3 × 4"])
def test_byte_pieces_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids) == len(text.encode())
    assert "".join(pieces) == text


def test_a_split_character_belongs_to_the_token_that_began_it():
    tokenizer = byte_tokenizer()
    assert token_pieces(tokenizer, tokenizer("a你b")["input_ids"]) == ["a", "你", "", "", "b"]
    # One token holds the end of 你 and the whole of b.
    last_byte = "ł"  # what byte-level BPE writes for 0xA0
    merged = byte_tokenizer([(last_byte, "b")])
    assert token_pieces(merged, merged("a你b")["input_ids"]) == ["a", "你", "", "b"]


def test_broken_bytes_and_cut_characters_do_not_swallow_tokens():
    tokenizer = byte_tokenizer()
    cut = tokenizer("a你")["input_ids"][:-1]
    assert token_pieces(tokenizer, cut) == ["a", "\ufffd", ""]
    lone = tokenizer("你")["input_ids"][1]
    ids = [lone] * 9 + tokenizer("ok")["input_ids"]
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == 11 and pieces[-1] == "k" and "".join(pieces) == tokenizer.decode(ids)


def test_random_bytes_join_to_the_decoded_text():
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("ab 你é🙂\n") for _ in range(20))
        ids = tokenizer(text)["input_ids"]
        assert "".join(token_pieces(tokenizer, ids)) == text


def test_word_level_pieces_and_special_tokens():
    tokenizer = word_tokenizer()
    ids = tokenizer("take 3 and add 4 .")["input_ids"] + [tokenizer.eos_token_id]
    pieces = token_pieces(tokenizer, ids)
    assert [p.strip() for p in pieces] == ["take", "3", "and", "add", "4", ".", "<eos>"]
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_visible_marks():
    assert visible_token(" a\n\t") == "␣a⏎⇥"
    assert visible_token("") == "⋯"
    assert visible_token("\x1b\u202e\ud800") == "‹1B›‹202E›‹D800›"
    assert visible_token("\u0301") == "◌\u0301"
    assert all(visible_token(token).isprintable() for token in NASTY)


def test_word_changes():
    pieces = word_changes(PROMPTS["original"], PROMPTS["counterfactual"])
    assert "".join(text for text, _ in pieces) == PROMPTS["counterfactual"]
    assert [text for text, changed in pieces if changed] == ["9"]
    new = [t for t, changed in word_changes(PROMPTS["original"], PROMPTS["paraphrase"], ignore_moves=True) if changed]
    assert "7" not in new and "12" not in new and "buying" in new
    # Two numbers that change places are a changed condition.
    swapped = word_changes("12 boys, 7 girls", "7 boys, 12 girls")
    assert any(changed for text, changed in swapped if text in ("7", "12"))
    assert word_changes("", "") == []
    assert [t for t, changed in word_changes("小明有三个苹果", "小明有五个苹果") if changed] == ["五"]


def test_long_prompts_are_shortened_round_the_change():
    text = "word " * 500 + "3 " + "word " * 500
    short = "".join(t for t, _ in shorten(word_changes(text, text.replace("3", "5"))))
    assert "5" in short and "[…]" in short and len(short) < 600
    assert len(shorten(word_changes("", text))) < 500


# --- data


def test_values_come_from_the_divergence_and_the_choice_from_the_method(tmp_path):
    trainer, row = make_trainer(tmp_path, method="entropy", max_completion_length=8), make_rows(1)[0]
    sampled, sample = [], trainer.sample
    trainer.sample = lambda *args, **kwargs: sampled.append(sample(*args, **kwargs)) or sampled[-1]
    heatmap = inspect_response(trainer, row)
    signals, ids = sampled[0].signals, sampled[0].completion_ids[0]
    assert "".join(heatmap.tokens) == make_tokenizer().decode(ids) and len(heatmap) == len(ids)
    chosen = select("entropy", signals, sampled[0].loss_mask, SelectionSettings())
    gap = signals["student/original"].sampled_logprobs[0] - signals["teacher/original"].sampled_logprobs[0]
    own = "Score: what entropy ranks tokens by"
    assert list(heatmap.rows) == [GAP, "Student entropy", own]
    for label, want in ((GAP, gap), (own, chosen.scores[0])):
        torch.testing.assert_close(torch.tensor(heatmap.rows[label]), want)
    assert heatmap.kept == chosen.mask[0].tolist()
    assert list(heatmap.kept_by) == ["entropy", "crop", "random", "tip"]
    for name, mask in heatmap.kept_by.items():
        of_name = select(name, signals, sampled[0].loss_mask, SelectionSettings(), step=0).mask[0]
        assert list(mask) == of_name.tolist()
    assert heatmap.prompts["original"][0] == row["prompt"][0]["content"]
    assert heatmap.prompts["counterfactual"][0] == row["counterfactual_prompt"][0]["content"]
    assert "that method 'entropy' keeps, after step 0." in heatmap.note and "The run used" not in heatmap.note
    # One that ranks no tokens has nothing of its own to show.
    trainer.args.method = "opd"
    heatmap, signals = inspect_response(trainer, row), sampled[-1].signals
    semantic = topk_jsd(signals["teacher/original"], signals["teacher/counterfactual"])[0]
    surface = topk_jsd(signals["teacher/original"], signals["teacher/paraphrase"])[0]
    assert list(heatmap.rows) == [GAP, MARGIN] and all(heatmap.kept)
    torch.testing.assert_close(torch.tensor(heatmap.rows[MARGIN]), semantic - surface)
    # The gap is to the method's target.
    trainer.args.method = "opsd"
    heatmap, signals = (
        inspect_response(trainer, {**row, "privileged_prompt": row["counterfactual_prompt"]}),
        sampled[-1].signals,
    )
    gap = signals["student/original"].sampled_logprobs[0] - signals["teacher/privileged"].sampled_logprobs[0]
    torch.testing.assert_close(torch.tensor(heatmap.rows[GAP]), gap)
    trainer.args.method = "credit-budgeted"
    note = inspect_response(trainer, row).note
    assert note.endswith("method 'crop' keeps, after step 0. The run used 'credit-budgeted'.")


def test_of_several_counterfactuals_it_shows_and_says_what_the_method_ranks_by(tmp_path):
    row = make_rows(1)[0]
    other = [{"role": "user", "content": "what is the sum of 1 and 19"}]
    row["counterfactual_prompts"] = [row.pop("counterfactual_prompt"), other]
    rows = {}
    for method, word in (("crop", "mean"), ("crop-max", "largest")):
        torch.manual_seed(0)
        heatmap = inspect_response(make_trainer(tmp_path, method=method, max_completion_length=8), row)
        assert f"What a condition moves is the {word} over up to 2 counterfactuals." in heatmap.note
        (pieces,) = [pieces for heading, pieces in heatmap.blocks() if heading == "Another counterfactual"]
        assert "19" in [text for text, mark in pieces if mark]
        rows[method] = torch.tensor(heatmap.rows[MARGIN])
    assert (rows["crop-max"] >= rows["crop"]).all() and (rows["crop-max"] > rows["crop"]).any()


def test_of_several_answers_a_wrong_one_is_shown_and_where_it_goes_wrong(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, method="crop", max_completion_length=8)
    rows = [{**row, "answer": "3", "solution": "1 + 2 = 3"} for row in make_rows(2)]
    monkeypatch.setattr("crop_trl.analysis.inspect._is_right", lambda row, *_: row is rows[0])
    heatmap = inspect_response(trainer, *rows)
    assert heatmap.prompts["original"][0] == rows[1]["prompt"][0]["content"]
    assert heatmap.verdict.startswith("The answer is wrong; 3 would be right.")
    monkeypatch.setattr("crop_trl.analysis.inspect._is_right", lambda *_: True)
    heatmap = inspect_response(trainer, *rows)
    assert (
        heatmap.prompts["original"][0] == rows[0]["prompt"][0]["content"]
        and heatmap.verdict == "The answer is right: 3."
    )


def test_the_first_wrong_value_of_an_answer():
    solution = "Known are: 24 books, 3 each. First we get 24 * 3 = 72 books. The answer is 72."
    reference = Reference.of_solution("Each of 3 pupils has 24 books.", solution)

    def found(answer):
        pieces = re.findall(r" ?\w+|\s*[^\w\s]", answer)
        place = reference.first_wrong(pieces)
        return place if place is None else pieces[place].strip()

    assert found("We have 24 books, 3 for each. So 24 * 3 = 72. The answer is 72.") is None
    assert found("We have 24 books, 3 for each. So 24 + 3 = 27. The answer is 27.") == "+"
    assert found("We have 24 books, 8 for each. So 24 * 8 = 192. The answer is 192.") == "8"


def test_scales_and_window():
    heatmap = ResponseHeatmap(["a"] * 3, {SEMANTIC: [0.4, 0, 0], SURFACE: [0.1, 0, 0], "own": [5, -9, 0]}, [1, 0, 0])
    # Equal colours mean equal numbers in the two divergences; a row of another kind has its own scale.
    assert heatmap.limit(SEMANTIC) == heatmap.limit(SURFACE) == 0.4 and heatmap.limit("own") == 9
    assert heatmap.style("own").colour == "signed"
    noise = ResponseHeatmap(["a"], {SEMANTIC: [1e-9]}, [True])
    assert noise.limit(SEMANTIC) == 0.1
    long = made_up(4096)
    start, end = long.window()
    assert end - start == 64 and start <= long.peak() < end
    assert made_up(120).window() == (0, 120)


# --- pictures


@pytest.mark.parametrize("n", [1, 37, 4096])
def test_png(tmp_path, n):
    pytest.importorskip("matplotlib")
    path = tmp_path / "new folder" / "map.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_png(made_up(n, note="step 30", prompts={kind: [text] for kind, text in PROMPTS.items()}), path)
    width, height = png_size(path)
    assert width == 3300 and 900 < height < 5250
    assert [p.name for p in path.parent.iterdir()] == ["map.png"]


def test_png_of_nasty_tokens_warns_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    heatmap = made_up(
        0, tokens=NASTY, note="$5 and \ud800", prompts={"original": ["你好 $a"], "counterfactual": ["你" * 400]}
    )
    heatmap.rows[MARGIN][3] = math.nan
    heatmap.rows[SURFACE] = [math.inf] * len(NASTY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_png(heatmap, tmp_path / "map.png")
    assert png_size(tmp_path / "map.png")[0] == 3300


def test_without_matplotlib_one_sentence(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"crop-trl\[viz\]"):
        save_png(made_up(3), tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "map.png"
    save_png(made_up(3), path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_png(made_up(5), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["map.png"]
