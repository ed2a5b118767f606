"""Small random models, a tokenizer and triplets for the tests: everything here is made on the spot, in milliseconds."""

import functools
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = [str(n) for n in range(40)] + "what is plus minus times the sum of and difference between product by".split()
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<unk>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def make_tokenizer(pad_token: str = "<pad>") -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def let_it_call(tokenizer: PreTrainedTokenizerFast, *models) -> None:
    """
    Let a turn end in a digit too, which calls the tool `double`. The template writes "times" once for each tool, and
    what the tool says as a user's turn.
    """
    for model in models:
        model.generation_config.eos_token_id = [1, *tokenizer.convert_tokens_to_ids(list("0123456789"))]
    called = {"type": "function", "function": {"name": "double", "arguments": {"n": "{n}"}}}
    call = {"open_pattern": r"(?P<n>\b\d)$", "repeats": True, "transform": called}
    fields = {"content": {}, "tool_calls": call}
    tokenizer.response_template = {"start_anchor": "<assistant>", "defaults": {"role": "assistant"}, "fields": fields}
    tokenizer.chat_template = (
        "{% if tools %}{{ 'times ' * tools | length }}{% endif %}{% for m in messages %}"
        "{{ '<' + ('user' if m.role == 'tool' else m.role) + '> ' + m.content }}"
        "{% if m.tool_calls %}{{ ' ' + m.tool_calls | tojson }}{% endif %}{{ ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
    )


def make_model(
    seed: int = 0, hidden: int = 32, vocab: int | None = None, layers: int = 2, tied: bool = True
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab or len(SPECIAL) + len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        max_position_embeddings=256,
        # Larger than usual, so that random models are not all but uniform.
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config)


@functools.cache
def make_rows(n: int, seed: int = 0, conversational: bool = True) -> Dataset:
    rng = random.Random(seed)

    def prompt(text):
        return [{"role": "user", "content": text}] if conversational else text + " <assistant>"

    rows = []
    for i in range(n):
        a, b, c = rng.randrange(20), rng.randrange(20), rng.randrange(20)
        rows.append(
            {
                "prompt": prompt(f"what is {a} plus {b}"),
                "paraphrase_prompt": prompt(f"what is the sum of {a} and {b}"),
                "counterfactual_prompt": prompt(f"what is the sum of {a} and {c}"),
                "answer": str(a + b),
                "id": str(i),
            }
        )
    return Dataset.from_list(rows)


def what_it_reads(*methods: str) -> dict:
    """Rows with every prompt that methods read, and a reward where one reads any: arguments of [`make_trainer`]."""
    from crop_trl import METHODS
    from crop_trl.prompts import EMPTY, prompt_column, prompt_kinds

    rows, found = make_rows(16), [METHODS[method] for method in methods]
    for kind in prompt_kinds([need for method in found for need in method.needs]):
        if kind != EMPTY and prompt_column(kind) not in rows.column_names:
            texts = [f"{row['prompt'][0]['content']} {sum(map(ord, kind)) % 40}" for row in rows]
            rows = rows.add_column(prompt_column(kind), [[{"role": "user", "content": text}] for text in texts])
    return {"rows": rows, **({"reward_funcs": [odd_tokens]} if any(m.needs_rewards for m in found) else {})}


def odd_tokens(completion_ids, **kwargs) -> list[float]:
    """A reward that differs from response to response, positive or not."""
    return [float(sum(ids) % 7 - 3) for ids in completion_ids]


def make_trainer(
    output_dir,
    student=None,
    teacher=None,
    rows=None,
    tokenizer=None,
    trainer_class=None,
    config_class=None,
    **overrides,
):
    """A trainer on the CPU: 8 responses of at most 12 tokens a step, random student and teacher."""
    from crop_trl import CROPConfig, CROPTrainer

    trainer_arguments = {
        name: overrides.pop(name)
        for name in (
            *("reward_funcs", "eval_dataset", "peft_config", "callbacks", "optimizers", "run_settings"),
            *("tools", "environment_factory", "rollout_func"),
        )
        if name in overrides
    }
    settings = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_completion_length": 12,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "score_top_k": 4,
        "disable_tqdm": True,
    }
    named = {"teacher_source", "teachers"} & set(overrides)
    return (trainer_class or CROPTrainer)(
        model=make_model(0) if student is None else student,
        teacher=make_model(1, hidden=48) if teacher is None and not named else teacher,
        args=(config_class or CROPConfig)(**{**settings, **overrides}),
        train_dataset=make_rows(16) if rows is None else rows or None,
        processing_class=make_tokenizer() if tokenizer is None else tokenizer,
        **trainer_arguments,
    )


def flat_weights(model) -> torch.Tensor:
    """All trainable parameters in one vector, for comparing two runs."""
    return torch.cat([p.detach().double().flatten() for _, p in sorted(model.named_parameters()) if p.requires_grad])


def metric(trainer, name: str) -> list[float]:
    """Values of a logged metric, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
