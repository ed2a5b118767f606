"""The table of methods, and the one way from signals to what enters the loss."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CASES, TopK, as_dicts, assert_close, jsd, keep_top, load_case, over_positions, random_topk

from crop_trl.methods import METHODS, Method, SelectionSettings, get_method, register_method, select
from crop_trl.methods import table as methods
from crop_trl.training.loss import sampled_opd_loss

both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
on_triplets = pytest.mark.parametrize("name", ["crop", "crop-bottom", "cf-opd", "pc-opd"])

NEEDS = {
    "opd": {"original"},
    "random": {"original"},
    "crop": {"original", "paraphrase", "counterfactual"},
    "crop-bottom": {"original", "paraphrase", "counterfactual"},
    "cf-opd": {"original", "counterfactual"},
    "pc-opd": {"original", "paraphrase"},
}


def margin(o: dict, p: dict, c: dict) -> float:
    return jsd(o, c) - jsd(o, p)


SLOW_SCORES = {
    "crop": margin,
    "crop-bottom": lambda o, p, c: -margin(o, p, c),
    "cf-opd": lambda o, p, c: jsd(o, c),
    "pc-opd": lambda o, p, c: -jsd(o, p),
}


def triplet_signals(seed: int, n_rows: int = 3, width: int = 12, vocab: int = 14, k: int = 5) -> dict[str, TopK]:
    """Teacher signals on partly shared ids."""
    generator = torch.Generator().manual_seed(seed)
    signals = {}
    for prompt in ("original", "paraphrase", "counterfactual"):
        signal = random_topk(generator, (n_rows, width), vocab, k)
        signal.sampled_logprobs = -torch.rand(n_rows, width, generator=generator, dtype=torch.float64)
        signals[f"teacher/{prompt}"] = signal
    return signals


def responses(*lengths: int, width: int) -> torch.Tensor:
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def dense(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


@pytest.fixture
def table(monkeypatch):
    """A copy of the table, to add to."""
    monkeypatch.setattr(methods, "METHODS", dict(METHODS))
    return methods.METHODS


# --- Stored values ----------------------------------------------------------------------------------------------------


# Of the other rows one draws at random, one needs several counterfactuals to differ from CROP, three are below, and of
# the rest test_rows.py has the values.
STORED = sorted(load_case(CASES[0], torch.float64)[0]["expected"]["losses"])


@both_precisions
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("case_name", CASES)
def test_golden_selection_and_loss(case_name, name, dtype):
    case, signals, loss_mask = load_case(case_name, dtype)
    config, expected = case["config"], case["expected"]
    selection = select(name, signals, loss_mask, SelectionSettings(config["ratio"], config["min_tokens"]))
    assert selection.mask.dtype == torch.bool
    valid = loss_mask.bool()

    def assert_stored(actual, stored):
        assert_close(actual[valid], torch.tensor(stored, dtype=torch.float64)[valid], dtype)

    if METHODS[name].score is None:
        assert selection.scores is None
        assert torch.equal(selection.mask, valid)
    else:
        assert_stored(selection.scores, expected["scores"][name])
        assert selection.mask.int().tolist() == expected["masks"][name]
    assert (selection.weights is None) == (name != "iw-opd")
    if selection.weights is not None:
        assert_stored(selection.weights, expected["iw_weights"])
    if name == "credit":
        assert_stored(selection.teacher_logprobs, expected["credit_teacher"]["0.1"])
    else:
        assert torch.equal(selection.teacher_logprobs, signals["teacher/original"].sampled_logprobs)
    value = sampled_opd_loss(
        torch.tensor(case["logprobs"]["new"], dtype=dtype),
        torch.tensor(case["logprobs"]["old"], dtype=dtype),
        selection.teacher_logprobs,
        torch.tensor(case["base_advantage"], dtype=dtype),
        selection.mask,
        weights=selection.weights,
        lambda_opd=config["lambda_opd"],
        epsilon_low=config["epsilon"],
        epsilon_high=config["epsilon_high"],
    )
    assert_close(value, expected["losses"][name], dtype)


# --- Slow reference ---------------------------------------------------------------------------------------------------


@on_triplets
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1, 1, 1), (2, 6, 4, 9), (3, 9, 12, 4)]),
    ratio=st.sampled_from([0.1, 0.2, 0.5, 1.0]),
)
@settings(max_examples=25)
def test_matches_reference(name, seed, shape, ratio):
    n_rows, width, vocab, k = shape
    signals = triplet_signals(seed, n_rows, width, vocab, k)
    loss_mask = torch.rand(n_rows, width, generator=torch.Generator().manual_seed(seed)) < 0.7
    selection = select(name, signals, loss_mask, SelectionSettings(ratio))
    slow = over_positions(SLOW_SCORES[name], *signals.values())
    assert_close(selection.scores, slow, torch.float64)
    # Ranked by the scores as computed: two that differ by rounding alone may stand either way round.
    expected = [keep_top(s, m, ratio) for s, m in zip(selection.scores.tolist(), loss_mask.tolist())]
    assert selection.mask.tolist() == expected


def test_measures_of_crop():
    signals = triplet_signals(2)
    selection = select("crop", signals, dense(3, 12), SelectionSettings())
    original, paraphrase, counterfactual = signals.values()
    semantic, surface = (over_positions(jsd, original, other) for other in (counterfactual, paraphrase))
    assert_close(selection.measures["semantic_divergence"], semantic, torch.float64)
    assert_close(selection.measures["surface_divergence"], surface, torch.float64)


# --- What each method does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEEDS)
def test_needs(name):
    """A method is computed from the signals it names, and does not run without any of them."""
    assert set(METHODS[name].needs) == {f"teacher/{prompt}" for prompt in NEEDS[name]}
    signals = triplet_signals(3)
    needed = {need: signals[need] for need in METHODS[name].needs}
    selection = select(name, needed, dense(3, 12), SelectionSettings())
    assert torch.equal(selection.teacher_logprobs, signals["teacher/original"].sampled_logprobs)
    assert selection.weights is None
    for missing in needed:
        rest = {need: signal for need, signal in needed.items() if need != missing}
        with pytest.raises(ValueError, match=f"{name}.*{missing}"):
            select(name, rest, dense(3, 12), SelectionSettings())


def test_missing_signals_are_all_named():
    with pytest.raises(ValueError, match=r"'crop'.*teacher/paraphrase, teacher/counterfactual"):
        select("crop", {"teacher/original": None}, dense(1, 1), SelectionSettings())


def test_opd_trains_every_token():
    mask = responses(4, 0, 9, width=9).int()
    selection = select("opd", triplet_signals(4, width=9), mask, SelectionSettings(retention_ratio=0.1))
    assert torch.equal(selection.mask, mask.bool())
    # The caller may go on to change its own mask.
    boolean = mask.bool()
    selection = select("opd", triplet_signals(4, width=9), boolean, SelectionSettings())
    boolean.zero_()
    assert selection.mask.sum() == 13


def test_crop_finds_the_token_that_depends_on_the_condition():
    """Position 1 moves under both rewordings, position 2 under the counterfactual alone, the rest under none."""

    def signal(*likeliest: int) -> TopK:
        ids = [[[token, 99] for token in likeliest]]
        return TopK(torch.tensor(ids), torch.tensor([0.9, 0.05]).log().expand(1, len(likeliest), 2), torch.zeros(1, 5))

    signals = {
        "teacher/original": signal(1, 2, 3, 4, 5),
        "teacher/paraphrase": signal(1, 7, 3, 4, 5),
        "teacher/counterfactual": signal(1, 7, 8, 4, 5),
    }

    def kept(name: str, ratio: float) -> list[int]:
        return select(name, signals, dense(1, 5), SelectionSettings(ratio)).mask[0].nonzero().flatten().tolist()

    assert kept("crop", 0.2) == [2]
    assert kept("cf-opd", 0.4) == [1, 2]
    assert kept("pc-opd", 0.8) == [0, 2, 3, 4]
    assert kept("crop-bottom", 0.2) == [0]  # a tie at zero: the earliest


def test_controls_by_place_and_by_likelihood():
    logprobs = torch.tensor([[-0.1, -2.0, -0.3, -3.0, -1.0], [-1.0, -0.2, -0.9, -5.0, -7.0]])
    signal = TopK(torch.zeros(0), torch.zeros(0), logprobs)
    signals, mask = {"teacher/original": signal, "student/original": signal}, responses(5, 3, width=5)
    # A tool wrote the first two tokens of the second response.
    mask[1] = torch.tensor([False, False, True, True, False])

    def kept(name: str) -> list[list[int]]:
        return [row.nonzero().flatten().tolist() for row in select(name, signals, mask, SelectionSettings(0.5)).mask]

    assert kept("first") == [[0, 1], [2]]
    assert kept("last") == [[3, 4], [3]]
    assert kept("least-likely") == [[1, 3], [3]]


@on_triplets
def test_bottom_reverses_and_signs(name):
    signals = triplet_signals(5)
    by_name = {n: select(n, signals, dense(3, 12), SelectionSettings()).scores for n in SLOW_SCORES}
    assert torch.equal(by_name["crop-bottom"], -by_name["crop"])
    torch.testing.assert_close(by_name["cf-opd"] + by_name["pc-opd"], by_name["crop"])
    assert (by_name["cf-opd"] >= 0).all() and (by_name["pc-opd"] <= 0).all()
    assert not torch.equal(by_name[name], torch.zeros_like(by_name[name]))


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_padding_changes_nothing(name):
    """The same responses in a wider batch, with anything beyond their end."""
    signals, mask = triplet_signals(6, width=12), responses(12, 5, 1, width=12)
    wide = {need: dataclasses.replace(signal) for need, signal in triplet_signals(60, width=20).items()}
    for need, signal in wide.items():
        for field in ("token_ids", "logprobs", "sampled_logprobs"):
            value = getattr(signal, field).clone()
            value[:, :12] = getattr(signals[need], field)
            setattr(signal, field, value)
    narrow_selection = select(name, signals, mask, SelectionSettings(0.3))
    wide_selection = select(name, wide, torch.nn.functional.pad(mask, (0, 8)), SelectionSettings(0.3))
    assert torch.equal(wide_selection.mask[:, :12], narrow_selection.mask)
    assert not wide_selection.mask[:, 12:].any()


@pytest.mark.parametrize("name", sorted(set(NEEDS) - {"opd"}))
def test_settings_reach_the_budget(name):
    signals, mask = triplet_signals(7, width=20), responses(20, 10, 2, width=20)
    for ratio, min_tokens, expected in [(0.2, 1, [4, 2, 1]), (0.5, 1, [10, 5, 1]), (0.05, 3, [3, 3, 2])]:
        selection = select(name, signals, mask, SelectionSettings(ratio, min_tokens))
        assert selection.mask.sum(-1).tolist() == expected
    with pytest.raises(ValueError, match="retention_ratio"):
        select(name, signals, mask, SelectionSettings(1.5))


def test_a_missing_row_of_scores_keeps_its_tokens():
    signals, mask = triplet_signals(8), responses(12, 7, 12, width=12)
    signals["teacher/counterfactual"].logprobs[1] = float("nan")
    selection = select("crop", signals, mask, SelectionSettings())
    assert torch.equal(selection.mask[1], mask[1])
    assert selection.mask.sum(-1).tolist() == [2, 7, 2]


def test_default_settings():
    assert dataclasses.asdict(SelectionSettings()) == {
        "retention_ratio": 0.2,
        "min_tokens": 1,
        "seed": 42,
        "iw_max_weight": 1.5,
        "credit_lambda": None,
        "method_settings": {},
    }


# --- Random -----------------------------------------------------------------------------------------------------------


def draw(mask: torch.Tensor, step: int = 3, seed: int = 42, rows=None) -> methods.Selection:
    signals = {"teacher/original": TopK(torch.zeros(0), torch.zeros(0), torch.zeros(mask.shape))}
    rows = None if rows is None else torch.tensor(rows)
    return select("random", signals, mask, SelectionSettings(0.3, seed=seed), step=step, rows=rows)


def test_random_is_reproducible():
    mask = responses(30, 12, 1, width=30)
    first, again = draw(mask), draw(mask)
    assert torch.equal(first.scores, again.scores) and torch.equal(first.mask, again.mask)
    assert first.mask.sum(-1).tolist() == [9, 3, 1]


def test_random_leaves_global_generators_alone():
    state = torch.random.get_rng_state()
    scores = draw(dense(2, 30)).scores
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(12345)
    assert torch.equal(draw(dense(2, 30)).scores, scores)


def test_random_changes_with_step_seed_and_row():
    mask = dense(2, 30)
    base = draw(mask)
    assert not torch.equal(base.mask, draw(mask, step=4).mask)
    assert not torch.equal(base.mask, draw(mask, seed=7).mask)
    assert not torch.equal(base.mask[0], base.mask[1])
    # The generator is one of (seed + step, row).
    assert torch.equal(draw(mask, step=4, seed=42).scores, draw(mask, step=0, seed=46).scores)


def test_random_does_not_depend_on_the_width():
    assert torch.equal(draw(dense(3, 50)).scores[:, :20], draw(dense(3, 20)).scores)


@given(st.permutations(range(7)), st.lists(st.integers(1, 6), max_size=3, unique=True).map(sorted))
@settings(max_examples=40)
def test_random_does_not_depend_on_order_or_split(order, cuts):
    """However the rows are shuffled and spread over ranks and micro-batches, row i gets what row i gets."""
    mask = responses(30, 12, 1, 0, 25, 30, 8, width=30)
    whole = draw(mask)
    collected = torch.zeros_like(mask)
    for start, end in zip([0, *cuts], [*cuts, 7]):
        rows = order[start:end]
        collected[rows] = draw(mask[rows], rows=list(rows)).mask
    assert torch.equal(collected, whole.mask)


def test_random_is_uniform():
    scores = draw(dense(20, 500)).scores
    assert 0.0 <= scores.min() and scores.max() < 1.0
    assert scores.mean().item() == pytest.approx(0.5, abs=0.02)
    kept = draw(dense(200, 20)).mask.double().mean(0)
    # 60 of 200 expected at each position; five standard deviations.
    assert (kept - 0.3).abs().max() < 5 * (0.3 * 0.7 / 200) ** 0.5


def test_random_without_rows():
    assert draw(torch.zeros(0, 5)).mask.shape == (0, 5)


# --- The table --------------------------------------------------------------------------------------------------------


def test_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match="'crpo'.*cf-opd, .*crop, crop-bottom, .*opd.*random"):
        get_method("crpo")
    with pytest.raises(ValueError, match="'base'"):
        select("base", {}, dense(1, 1), SelectionSettings())


def test_register_method(table):
    def first_tokens(signals, ctx):
        return -torch.arange(ctx.loss_mask.size(1)).expand(ctx.loss_mask.shape).double()

    register_method("beginning", Method(needs=(), score=first_tokens))
    # The training target is always among the needs.
    assert get_method("beginning").needs == ("teacher/original",)
    selection = select("beginning", triplet_signals(9), dense(3, 12), SelectionSettings(0.25))
    assert selection.mask.tolist() == [[True] * 3 + [False] * 9] * 3


def test_registered_functions_see_signals_and_context(table):
    seen = []

    def remember(signals, ctx):
        seen.append((signals, ctx))
        return torch.full(ctx.loss_mask.shape, 0.5)

    def gather(values):
        return values

    register_method(
        "all", Method(needs=("student/original",), score=remember, weight=remember, teacher_target=remember)
    )
    signals = {**triplet_signals(10), "student/original": triplet_signals(10)["teacher/original"]}
    options = SelectionSettings(0.5, seed=3)
    rows = torch.tensor([4, 0, 2])
    selection = select("all", signals, torch.ones(3, 12), options, step=8, rows=rows, gather=gather)
    assert len(seen) == 3
    for got, ctx in seen:
        assert {name: got[name] for name in got} == signals
        assert (ctx.settings, ctx.step, ctx.gather) == (options, 8, gather)
        assert ctx.rows.tolist() == [4, 0, 2]
        assert ctx.loss_mask.dtype == torch.bool
    assert torch.equal(selection.teacher_logprobs, torch.full((3, 12), 0.5))
    assert torch.equal(selection.weights, torch.full((3, 12), 0.5))


def test_dense_methods_with_weights_keep_every_token(table):
    register_method("halved", Method(needs=(), weight=lambda signals, ctx: torch.full(ctx.loss_mask.shape, 0.5)))
    mask = responses(12, 3, 0, width=12)
    selection = select("halved", triplet_signals(11), mask, SelectionSettings(0.1))
    assert torch.equal(selection.mask, mask) and selection.scores is None


def test_scores_of_which_none_is_finite_are_refused_unless_another_process_has_some(table):
    register_method("none", Method(score=lambda signals, ctx: torch.full(ctx.loss_mask.shape, torch.nan)))
    mask = torch.ones(3, 12)
    with pytest.raises(ValueError, match="Method 'none' gives none of 36 tokens a finite score"):
        select("none", triplet_signals(11), mask, SelectionSettings())
    others = torch.tensor([10, 1])
    selection = select(
        "none", triplet_signals(11), mask, SelectionSettings(), gather=lambda own: torch.cat([own, others])
    )
    assert selection.mask.all()


def test_names_are_taken_once(table):
    before = table["crop"]
    with pytest.raises(ValueError, match="'crop'.*already"):
        register_method("crop", Method(needs=()))
    assert table["crop"] is before


def test_only_methods_are_registered(table):
    with pytest.raises(ValueError, match="takes a `Method`, got function"):
        register_method("mine", lambda signals, ctx: None)
    assert "mine" not in table


def test_reference_reads_the_same_distributions():
    """The dictionaries that the slow reference works on are the signal, entry by entry."""
    signal = triplet_signals(12)["teacher/original"]
    read = as_dicts(signal)[1][2]
    assert list(read) == signal.token_ids[1, 2].tolist()
    assert list(read.values()) == signal.logprobs[1, 2].tolist()


def test_a_method_that_writes_to_its_signals_changes_no_target(table):
    def vandal(signals, ctx):
        return signals["teacher/original"].sampled_logprobs.zero_()

    register_method("vandal", Method(score=vandal))
    signals = triplet_signals(3)
    before = signals["teacher/original"].sampled_logprobs.clone()
    assert torch.equal(select("vandal", signals, torch.ones(3, 12), SelectionSettings()).teacher_logprobs, before)
