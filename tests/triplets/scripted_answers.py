"""What a scripted model says: good answers, and every way in which one can be bad.

Each problem has a plan, chosen by a checksum of its text (or by a `[plan:NAME]` in it), and a plan says what becomes of
the problem: a run's records can be checked one by one.
"""

import json
import re
import zlib

# What no HTTP client takes for a reply.
RAW_REPLIES = {
    "bad_status": b"HTTP/1.1 abc you sent {key}\r\n\r\n",
    "garbage": b"\x16\x03\xff {key}\x00\xfe\r\n\r\n",
    "long_header": b"HTTP/1.1 200 OK\r\nX-Key: {key}" + 200_000 * b"a" + b"\r\n\r\n",
    "negative_length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "two_lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n{}",
    "bad_chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{key}\r\n{}",
    "bad_header": b"HTTP/1.1 200 OK\r\n: {key}\r\n\r\n",
}

# name: (share, status that the record must get, generator by round, critic by round, transport faults)
# A tuple holds round 1 and round 2; one name stands for both.
PLANS = {
    "good": (120, "strict_pass", "good", "good", None),
    "one_candidate": (4, "strict_pass", "one", "good", None),
    "fenced": (3, "strict_pass", "fenced", "fenced", None),
    "thinking": (3, "strict_pass", "thinking", "thinking", None),
    "braces": (2, "strict_pass", "braces", "braces", None),
    "example": (2, "strict_pass", "example", "example", None),
    "tag_in_text": (2, "strict_pass", "tag_in_text", "good", None),
    "filled_up": (2, "strict_pass", "filled_up", "filled_up", None),
    "too_many": (2, "strict_pass", "too_many", "good", None),
    "one_bad_candidate": (2, "strict_pass", "one_bad", "good", None),
    "one_control": (2, "strict_pass", "one_control", "good", None),
    "wrong_selection": (4, "strict_pass", "good", "wrong_selection", None),
    "missing_evaluation": (2, "strict_pass", "good", "only_second", None),
    "unknown_number": (2, "needs_review", "good", "unknown_number", None),
    "numbered_from_0": (2, "needs_review", "good", "numbered_from_0", None),
    "accepted_if_fixed": (2, "needs_review", "good", "accepted_if_fixed", None),
    "unclosed_thinking": (2, "needs_review", "good", "unclosed_thinking", None),
    "duplicate_number": (2, "strict_pass", "good", "first_twice", None),
    "one_confidence_string": (2, "strict_pass", "good", "first_confidence_string", None),
    "repaired": (8, "repaired_pass", "good", ("reject", "good"), None),
    "repaired_not_json": (1, "repaired_pass", ("not_json", "good"), "good", None),
    "repaired_cut_off": (1, "repaired_pass", ("cut_off", "good"), "good", None),
    "repaired_empty": (1, "repaired_pass", ("empty", "good"), "good", None),
    "repaired_wrong_schema": (1, "repaired_pass", ("wrong_schema", "good"), "good", None),
    "repaired_refusal": (1, "repaired_pass", ("refusal", "good"), "good", None),
    "repaired_filter": (1, "repaired_pass", ("content_filter", "good"), "good", None),
    "repaired_none": (1, "repaired_pass", ("none", "good"), "good", None),
    "repaired_control": (1, "repaired_pass", ("control", "good"), "good", None),
    "repaired_critic_not_json": (1, "repaired_pass", "good", ("not_json", "good"), None),
    "not_json": (1, "pending_repair", "not_json", "good", None),
    "cut_off": (1, "pending_repair", "cut_off", "good", None),
    "empty": (1, "pending_repair", "empty", "good", None),
    "wrong_schema": (1, "pending_repair", "wrong_schema", "good", None),
    "refusal": (1, "pending_repair", "refusal", "good", None),
    "control": (2, "pending_repair", "control", "good", None),
    "surrogate": (1, "pending_repair", "surrogate", "good", None),
    "reject": (3, "needs_review", "good", "reject", None),
    "low_paraphrase": (1, "needs_review", "good", "low_paraphrase", None),
    "low_counterfactual": (1, "needs_review", "good", "low_counterfactual", None),
    "low_overall": (1, "needs_review", "good", "low_overall", None),
    "violation_but_accepted": (1, "needs_review", "good", "violation", None),
    "type_mismatch": (1, "needs_review", "good", "type_mismatch", None),
    "underdetermined": (1, "needs_review", "good", "underdetermined", None),
    "original_inconsistent": (1, "needs_review", "good", "original_inconsistent", None),
    "critic_not_json": (1, "needs_review", "good", "not_json", None),
    "critic_cut_off": (1, "needs_review", "good", "cut_off", None),
    "critic_empty": (1, "needs_review", "good", "empty", None),
    "critic_wrong_schema": (1, "needs_review", "good", "wrong_schema", None),
    "critic_refusal": (1, "needs_review", "good", "refusal", None),
    "critic_duplicate_key": (1, "needs_review", "good", "duplicate_key", None),
    "critic_all_twice": (1, "needs_review", "good", "all_twice", None),
    "confidence_out_of_range": (1, "needs_review", "good", "confidence_out_of_range", None),
    "confidence_nan": (1, "needs_review", "good", "confidence_nan", None),
    "confidence_string": (1, "needs_review", "good", "confidence_string", None),
    "same_texts": (1, "needs_review", "same_texts", "good", None),
    "broken_latex": (1, "needs_review", "broken_latex", "good", None),
    "http_429": (4, "strict_pass", "good", "good", "429"),
    "http_500": (2, "strict_pass", "good", "good", "500"),
    "http_503": (2, "strict_pass", "good", "good", "503"),
    "http_html": (2, "strict_pass", "good", "good", "html"),
    "http_no_choices": (2, "strict_pass", "good", "good", "no_choices"),
    "http_cut": (2, "strict_pass", "good", "good", "cut"),
    "http_hang": (1, "strict_pass", "good", "good", "hang"),
    "http_400": (1, "pending_repair", "good", "good", "400"),
    "http_400_critic": (1, "needs_review", "good", "good", "400_critic"),
    "http_403": (0, "pending_repair", "good", "good", "403"),
    **{f"http_{fault}": (0, "strict_pass", "good", "good", fault) for fault in ("plain", "error", "abort", "drip")},
    **{f"http_{fault}": (0, "strict_pass", "good", "good", fault) for fault in RAW_REPLIES},
    "http_always_500": (0, "pending_repair", "good", "good", "always_500"),
    "http_drop": (0, "pending_repair", "good", "good", "drop"),
}
_WHEEL = [name for name, plan in PLANS.items() for _ in range(plan[0])]


def plan_of(problem: str) -> str:
    """The plan of a problem; duplicates share one."""
    named = re.search(r"\[plan:(\w+)\]", problem)
    return named[1] if named else _WHEEL[zlib.crc32(problem.encode()) % len(_WHEEL)]


def expected_status(problem: str) -> str:
    """The status that a run over `problem` must end in."""
    return PLANS[plan_of(problem)][1]


def candidate(problem: str, number: int) -> dict[str, str]:
    changed, count = re.subn(r"\d+", lambda m: str(int(m[0]) + number), problem, count=1)
    return {
        "condition_type": ("Side Length", "modulus", "initial value")[number % 3],
        "original_condition_description": "the first number",
        "paraphrased_condition_description": "the first number, as before",
        "counterfactual_condition_description": f"the first number is {number} larger",
        "paraphrase_problem": f"In other words: {problem}",
        "counterfactual_problem": changed if count else f"{problem} Take {number} away.",
        "counterfactual_description": "One number differs.",
    }


def generator(kind: str, problem: str) -> tuple[str | None, str, str | None]:
    """Content, finish reason and refusal of a generator's answer."""
    count = {"one": 1, "too_many": 4}.get(kind, 3)
    candidates = [candidate(problem, n) for n in range(1, count + 1)]
    if kind == "one_bad":
        del candidates[1]["paraphrase_problem"]
    elif kind == "one_control":
        candidates[0]["paraphrase_problem"] += " \frac{1}{2}"
    elif kind == "control":
        for item in candidates:
            item["counterfactual_problem"] += "\x0crac{1}{2}"
    elif kind == "surrogate":
        for item in candidates:
            item["paraphrase_problem"] += "\ud83d"
    elif kind == "same_texts":
        for item in candidates:
            item["counterfactual_problem"] = item["paraphrase_problem"].replace("words: ", "words:  ")
    elif kind == "broken_latex":
        for item in candidates:
            item["counterfactual_problem"] += " with $2 \times 3$"
    elif kind == "tag_in_text":
        for item in candidates:
            item["counterfactual_description"] += " (see </think>)"
    elif kind == "none":
        candidates = []
    content = json.dumps({"decision": "candidates", "candidates": candidates})
    return finish(kind, content)


def critic(kind: str, candidates: list, answer_type: str = "single_integer") -> tuple[str | None, str, str | None]:
    """Content, finish reason and refusal of a critic's answer."""
    evaluations = []
    for n in range(1, len(candidates) + 1):
        evaluation = {
            "candidate_number": n,
            "decision": "accept",
            "violations": [],
            "paraphrase_status": "accept",
            "paraphrase_confidence": 0.99 - n / 100,
            "paraphrase_reason": "Same conditions, other words.",
            "counterfactual_status": "accept",
            "counterfactual_confidence": 0.96 - n / 100,
            "counterfactual_reason": "One number differs and the problem stays sound.",
            "original_answer_type": answer_type,
            "counterfactual_answer_type": answer_type,
            "original_determinacy": "determinate",
            "counterfactual_determinacy": "determinate",
            "determinacy_evidence": "A linear equation has one root.",
            "confidence": 0.97 - n / 100,
        }
        evaluation["candidate_number"] -= kind == "numbered_from_0"
        first = n == 1
        if kind == "reject" or (kind == "wrong_selection" and first):
            evaluation |= {
                "decision": "reject",
                "counterfactual_status": "reject",
                "violations": [{"criterion": "two_conditions", "evidence": "both numbers differ"}],
            }
        elif kind == "low_paraphrase":
            evaluation["paraphrase_confidence"] = 0.8
        elif kind == "low_counterfactual":
            evaluation["counterfactual_confidence"] = 0.8499
        elif kind == "low_overall":
            evaluation["confidence"] = 0.2
        elif kind == "violation":
            evaluation["violations"] = [{"criterion": "awkward", "evidence": "reads badly"}]
        elif kind == "type_mismatch":
            evaluation["counterfactual_answer_type"] = "single_rational"
        elif kind == "underdetermined":
            evaluation["counterfactual_determinacy"] = "underdetermined"
        elif kind == "original_inconsistent":
            evaluation["original_determinacy"] = "inconsistent"
        elif kind == "confidence_out_of_range":
            evaluation["confidence"] = 97
        elif kind == "confidence_nan":
            evaluation["confidence"] = float("nan")
        elif kind == "confidence_string" or (kind == "first_confidence_string" and first):
            evaluation["paraphrase_confidence"] = "0.99"
        evaluations.append(evaluation)
    if kind == "only_second":
        evaluations = evaluations[1:2]
    elif kind == "unknown_number":
        evaluations.append(evaluations[0] | {"candidate_number": 7})
    elif kind == "first_twice":
        evaluations.append(dict(evaluations[0], decision="reject"))
    elif kind == "all_twice":
        evaluations += evaluations
    content = json.dumps({"evaluations": evaluations, "selected_candidate_number": 1})
    if kind == "accepted_if_fixed":
        content = f"{critic('reject', candidates)[0]} If that were mended: {content}"
    if kind == "duplicate_key":
        content = content.replace('"decision": "accept"', '"decision": "accept", "decision": "reject"', 1)
    return finish(kind, content)


def finish(kind: str, content: str) -> tuple[str | None, str, str | None]:
    if kind == "not_json":
        return content.replace(":", " =", 3), "stop", None
    if kind == "cut_off":
        return content[: len(content) // 2], "length", None
    if kind == "empty":
        return "", "stop", None
    if kind == "wrong_schema":
        return json.dumps({"result": json.loads(content)}), "stop", None
    if kind == "refusal":
        return None, "stop", "I can't help with that."
    if kind == "content_filter":
        return content[:20], "content_filter", None
    if kind == "fenced":
        return f"Sure, here {{it}} is:\n```json\n{content}\n```\nAnything else?", "stop", None
    if kind == "braces":
        return f"{'With {x} and {1, 2}, ' * 30}so: {content}", "stop", None
    if kind == "example":
        return f'In the form {{"candidates": [], "evaluations": []}}:\n{content}', "stop", None
    if kind == "filled_up":
        return content + " " * 400, "length", None
    if kind == "unclosed_thinking":
        return f"<think>One might say {content} but let me see.", "stop", None
    if kind == "thinking":
        return f'<think>Let me see {{"candidates": ...}}</think>\n{content}', "stop", None
    return content, "stop", None
