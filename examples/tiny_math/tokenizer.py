"""The small tokenizer that both models share: whole words, single digits, and bytes for everything else.

It is a BPE without merges: a piece of text that is in the vocabulary becomes one token, any other falls back to its
bytes. So it is lossless on all text, and a few hundred entries are enough.
"""

import json
from pathlib import Path
from random import Random

from problems import SCHEMAS, sample_problem
from solutions import CHECKS, CLOSINGS, FILLER, FIRST_LEADS, GIVEN, NEXT_LEADS, NOTE_LEADS, OPENINGS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# The answer-format wrapper around every problem. Use it with str.replace, not str.format: it has braces of its own.
PROMPT_TEMPLATE = "{problem}\nGive the answer in \\boxed{}."

PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# A word or digit takes the space before it along. The box opens in one token: it is a matter of format, not of content.
PIECES = r" ?\\boxed\{| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s"


def wrap(problem: str) -> str:
    """The user's message for a problem."""
    return PROMPT_TEMPLATE.replace("{problem}", problem)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _vocabulary_texts() -> list[str]:
    """Texts that together hold every word of the world."""
    texts = [PROMPT_TEMPLATE, " 0 1 2 3 4 5 6 7 8 9", "0123456789"]
    for phrasings in (OPENINGS, GIVEN, NOTE_LEADS, FIRST_LEADS, NEXT_LEADS, CHECKS, CLOSINGS, *FILLER):
        texts += [part for phrasing in phrasings for part in (phrasing, " " + phrasing)]
    rng = Random("vocabulary")
    for _ in range(400 * len(SCHEMAS)):
        for split in ("train", "heldout"):
            problem = sample_problem(rng, split, held_out_form=split == "heldout")
            texts += [problem.text, " " + problem.text, problem.solution(rng)]
    return texts


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Collect the vocabulary and put the tokenizer together."""
    split = _pre_tokenizer()
    words = {piece for text in _vocabulary_texts() for piece, _ in split.pre_tokenize_str(text)}
    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries += sorted(words - set(entries))
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer; the class name recorded is the one that every version of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
