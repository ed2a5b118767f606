"""The budget, the top-b mask and the batch quantile normalisation."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CASES, GOLDEN, TOLERANCE, assert_close, budget, keep_top, load_case, quantile_normalize

from crop_trl.methods import budget as selection
from crop_trl.methods.budget import response_budget, select_top_b

both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
ratios = st.one_of(st.integers(1, 100).map(lambda percent: percent / 100), st.floats(1e-4, 1.0))
# Few distinct values, so that ties are the rule, and everything that is not a number.
score = st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.5, 1.0, math.nan, math.inf, -math.inf])


@st.composite
def scored_rows(draw) -> tuple[list[list[float]], list[list[bool]]]:
    """Scores and loss masks of the same shape, with holes anywhere."""
    n_rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 20))

    def grid(element):
        return draw(st.lists(st.lists(element, min_size=width, max_size=width), min_size=n_rows, max_size=n_rows))

    return grid(score), grid(st.booleans())


# --- Budget -----------------------------------------------------------------------------------------------------------


def test_golden_budgets():
    cases = json.loads((GOLDEN / "budgets.json").read_text())
    assert len(cases) > 100
    for case in cases:
        assert response_budget(case["n"], case["ratio"], case["min_tokens"]) == case["b"], case
    for ratio in {case["ratio"] for case in cases}:
        same = [case for case in cases if case["ratio"] == ratio and case["min_tokens"] == 1]
        counts = torch.tensor([case["n"] for case in same])
        assert response_budget(counts, ratio).tolist() == [case["b"] for case in same]


@pytest.mark.parametrize("ratio, n, expected", [(0.29, 100, 29), (0.57, 100, 57), (0.07, 100, 7), (0.1, 4090, 409)])
def test_floor_is_of_the_decimal_that_was_written(ratio, n, expected):
    assert response_budget(n, ratio) == expected
    assert response_budget(torch.tensor([n]), ratio).tolist() == [expected]


@given(st.integers(0, 5000), ratios, st.integers(1, 8))
@settings(max_examples=200)
def test_budget_matches_reference(n, ratio, min_tokens):
    kept = response_budget(n, ratio, min_tokens)
    assert kept == budget(n, ratio, min_tokens)
    assert kept <= n
    assert kept >= min(n, min_tokens)
    assert response_budget(torch.tensor(n), ratio, min_tokens).item() == kept


def test_budget_keeps_type_and_shape():
    counts = torch.tensor([[0, 1], [7, 40]], dtype=torch.int32)
    kept = response_budget(counts, 0.2)
    assert kept.dtype == torch.int32
    assert kept.tolist() == [[0, 1], [1, 8]]
    assert response_budget(torch.zeros(0, dtype=torch.int64), 0.2).shape == (0,)
    assert isinstance(response_budget(7, 0.2), int)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, math.nan])
def test_ratio_outside_its_range(ratio):
    with pytest.raises(ValueError, match=rf"retention_ratio.*\(0, 1\].*{ratio}"):
        response_budget(10, ratio)


def test_min_tokens_below_one():
    with pytest.raises(ValueError, match="min_tokens.*at least 1.*0"):
        response_budget(10, 0.2, 0)


# --- Mask -------------------------------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("name", CASES)
def test_golden_masks(name, dtype):
    case, _, loss_mask = load_case(name, dtype)
    expected = case["expected"]
    for method, scores in expected["scores"].items():
        kept = select_top_b(torch.tensor(scores, dtype=dtype), loss_mask, case["config"]["ratio"])
        assert kept.dtype == torch.bool
        assert kept.int().tolist() == expected["masks"][method], method


@given(scored_rows(), ratios, st.integers(1, 4))
@settings(max_examples=300)
def test_mask_matches_reference(rows, ratio, min_tokens):
    scores, mask = rows
    kept = select_top_b(torch.tensor(scores), torch.tensor(mask), ratio, min_tokens)
    assert kept.tolist() == [keep_top(row, marks, ratio, min_tokens) for row, marks in zip(scores, mask)]


@given(scored_rows(), ratios)
@settings(max_examples=150)
def test_mask_obeys_its_budget(rows, ratio):
    scores, mask = (torch.tensor(x) for x in rows)
    kept = select_top_b(scores, mask, ratio)
    assert not (kept & ~mask).any()
    for row, marks, chosen in zip(scores, mask, kept):
        candidates = marks & row.isfinite()
        if not candidates.any():
            assert torch.equal(chosen, marks)
            continue
        assert not (chosen & ~candidates).any()
        assert int(chosen.sum()) == response_budget(int(candidates.sum()), ratio)
        left = candidates & ~chosen
        assert not left.any() or row[chosen].min() >= row[left].max()


def test_equal_scores_keep_the_earlier():
    # Long enough that sorting routines leave their small, accidentally stable, paths.
    scores, mask = torch.zeros(2, 5000), torch.ones(2, 5000)
    scores[1, 2500:] = 1.0
    kept = select_top_b(scores, mask, 0.2)
    assert kept[0].nonzero().flatten().tolist() == list(range(1000))
    assert kept[1].nonzero().flatten().tolist() == list(range(2500, 3500))


def test_negative_zero_equals_zero():
    scores = torch.zeros(1, 3000)
    scores[0, ::2] = -0.0
    kept = select_top_b(scores, torch.ones(1, 3000), 0.1)
    assert kept[0].nonzero().flatten().tolist() == list(range(300))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [100, 3000, 5000])
def test_ties_are_broken_alike_on_cuda(width):
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(-2, 3, (16, width), generator=generator) * 0.5
    scores[torch.rand(16, width, generator=generator) < 0.2] = -0.0
    scores[torch.rand(16, width, generator=generator) < 0.1] = math.nan
    mask = torch.rand(16, width, generator=generator) < 0.8
    for ratio in (0.2, 0.29, 0.5):
        assert torch.equal(select_top_b(scores.cuda(), mask.cuda(), ratio).cpu(), select_top_b(scores, mask, ratio))


def test_holes_and_padding_do_not_count():
    scores = torch.tensor([[9.0, 1.0, 9.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 0, 1, 1, 1, 1, 0, 0]])
    # Five positions count, so 0.4 keeps two; the nines are outside.
    assert select_top_b(scores, mask, 0.4)[0].nonzero().flatten().tolist() == [5, 6]
    # A wider padding changes nothing.
    wide = select_top_b(
        torch.nn.functional.pad(scores, (0, 50), value=9.0), torch.nn.functional.pad(mask, (0, 50)), 0.4
    )
    assert wide[0].nonzero().flatten().tolist() == [5, 6]


def test_all_padding_keeps_nothing():
    assert not select_top_b(torch.randn(3, 6), torch.zeros(3, 6), 0.5).any()


def test_row_without_a_finite_score_keeps_its_mask():
    scores = torch.tensor([[math.nan, math.inf, -math.inf, math.nan], [math.nan, 1.0, math.inf, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    kept = select_top_b(scores, mask, 0.2)
    assert kept.tolist() == [[True, False, True, True], [False, True, False, False]]


def test_length_one_responses():
    scores = torch.tensor([[-3.0], [math.nan], [5.0]])
    mask = torch.tensor([[1], [1], [0]])
    assert select_top_b(scores, mask, 0.2).tolist() == [[True], [True], [False]]


def test_negative_scores_are_selected():
    scores = torch.tensor([[-5.0, -1.0, -3.0, -torch.finfo(torch.float32).max]])
    assert select_top_b(scores, torch.ones(1, 4), 0.75).tolist() == [[True, True, True, False]]
    assert select_top_b(scores, torch.ones(1, 4), 1.0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_batches(shape):
    assert select_top_b(torch.zeros(shape), torch.zeros(shape), 0.2).shape == shape


def test_inputs_stay_untouched():
    scores, mask = torch.randn(2, 9), torch.ones(2, 9)
    before = scores.clone()
    select_top_b(scores, mask, 0.2)
    assert torch.equal(scores, before)
    assert torch.equal(mask, torch.ones(2, 9))


# --- Quantile normalisation -------------------------------------------------------------------------------------------


@both_precisions
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("measure", ["entropy", "forward_kl", "overlap_mass", "crop"])
def test_golden_normalisation(name, measure, dtype):
    case, _, loss_mask = load_case(name, dtype)
    expected = case["expected"]
    raw = expected["scores"]["crop"] if measure == "crop" else expected[measure]
    normalised = selection.quantile_normalize(torch.tensor(raw, dtype=dtype), loss_mask)
    assert_close(normalised, expected["normalized"][measure], dtype)


@both_precisions
def test_normalisation_matches_reference(dtype):
    generator = torch.Generator().manual_seed(11)
    for n_rows, width in [(1, 1), (1, 2), (2, 7), (5, 31)]:
        x = torch.randn(n_rows, width, generator=generator, dtype=torch.float64).to(dtype)
        mask = torch.rand(n_rows, width, generator=generator) < 0.7
        mask[0, 0] = True
        assert_close(selection.quantile_normalize(x, mask), quantile_normalize(x.tolist(), mask.tolist()), dtype)


def test_normalisation_by_hand():
    # 0..20: the 5 % quantile is 1, the 95 % quantile 19.
    x = torch.arange(21, dtype=torch.float64).flip(0)[None]
    normalised = selection.quantile_normalize(x, torch.ones(1, 21), eps=0.0)
    assert normalised[0].tolist() == pytest.approx([min(1.0, max(0.0, (v - 1) / 18)) for v in range(20, -1, -1)])
    # Two values: quantiles lie between them.
    two = selection.quantile_normalize(torch.tensor([[0.0, 1.0, 0.5]]).double(), torch.ones(1, 3), 0.25, 0.75, eps=0.0)
    assert two[0].tolist() == pytest.approx([0.0, 1.0, 0.5])


def test_constant_measure_is_zero_everywhere():
    assert selection.quantile_normalize(torch.full((2, 4), 0.3), torch.ones(2, 4)).tolist() == [[0.0] * 4] * 2


def test_values_outside_the_mask_have_no_part():
    x = torch.tensor([[1.0, 2.0, math.nan, 3.0], [1e9, 4.0, math.inf, -math.inf]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0]])
    normalised = selection.quantile_normalize(x, mask)
    alone = selection.quantile_normalize(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 4))[0].tolist()
    assert normalised[0].tolist() == pytest.approx([alone[0], alone[1], 0.0, alone[2]])
    assert normalised[1].tolist() == pytest.approx([0.0, alone[3], 0.0, 0.0])


def test_missing_values_stay_missing():
    x = torch.tensor([[1.0, math.nan, 2.0], [math.nan, math.nan, math.nan]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    normalised = selection.quantile_normalize(x, mask)
    assert normalised.isnan().tolist() == [[False, True, False], [True, True, False]]
    # Also where nothing at all is known: a zero would make these positions candidates.
    assert selection.quantile_normalize(x[1:], mask[1:]).isnan().tolist() == [[True, True, False]]
    assert selection.quantile_normalize(x[1:], torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any), st.integers(0, 2**31))
@settings(max_examples=60)
def test_gathered_ranks_equal_one_batch(valid_per_rank, seed):
    """Ranks of any length, also without a valid token, normalise as the concatenation does."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(1, 12, generator=generator, dtype=torch.float64) for _ in valid_per_rank]
    masks = [torch.arange(12)[None] < n for n in valid_per_rank]
    everything = torch.cat([x[m] for x, m in zip(parts, masks)])
    handed_over = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        assert values.ndim == 1
        handed_over.append(values)
        return everything

    normalised = [selection.quantile_normalize(x, m, gather=gather) for x, m in zip(parts, masks)]
    together = selection.quantile_normalize(torch.cat(parts), torch.cat(masks))
    torch.testing.assert_close(torch.cat(normalised), together, rtol=0, atol=TOLERANCE[torch.float64])
    # Every rank takes part, whatever it holds: one that stayed away would leave the others waiting.
    assert torch.equal(torch.cat(handed_over), everything)
    assert len(handed_over) == len(parts)


def test_more_values_than_torch_quantile_takes():
    n = 2**24 + 1000
    everything = torch.arange(n, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="too large"):
        everything.quantile(0.05)
    # As on one rank of many: few values here, the rest from elsewhere.
    at = [0, n // 20 + 1000, n // 3, n - n // 20 - 1000, n - 1]
    x = torch.tensor([at], dtype=torch.float64)
    normalised = selection.quantile_normalize(x, torch.ones(1, 5), gather=lambda values: everything)
    expected = [min(1.0, max(0.0, (v - 0.05 * (n - 1)) / (0.9 * (n - 1)))) for v in at]
    assert normalised[0].tolist() == pytest.approx(expected, abs=1e-12)
