"""The comparison behind the engine check and the doctor: a flipped bit is found and named, and verdicts follow from findings."""

import math
import struct

import pytest

from determinism.selfcheck import (
    BROKEN,
    KEPT,
    UNCHECKED,
    Answer,
    Finding,
    Report,
    Trial,
    describe,
    first_difference,
    float32_ulps,
    gap_between,
)


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def next_f32(value: float) -> float:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<i", bits + 1))[0]


def trial(name: str, changes: dict[int, Answer] | None = None) -> Trial:
    answers = [Answer((10 + i, 11 + i, 12 + i), (f32(-0.1 * (i + 1)), f32(-0.2), f32(-3.3))) for i in range(5)]
    for position, answer in (changes or {}).items():
        answers[position] = answer
    return Trial(name, tuple(answers))


def test_equal_trials_have_no_difference():
    assert first_difference([trial("one batch"), trial("reversed"), trial("singles")]) is None


def test_one_flipped_bit_in_one_log_probability_is_found_and_named():
    flipped = Answer((13, 14, 15), (f32(-0.4), f32(-0.2), next_f32(-3.3)))
    found = first_difference([trial("one batch"), trial("reversed"), trial("singles", {3: flipped})])
    assert found is not None
    assert (found.reference, found.trial) == ("one batch", "singles")
    assert (found.request, found.token, found.quantity, found.ulps) == (3, 2, "log-probability", 1)
    assert (found.a, found.b) == (f32(-3.3), next_f32(-3.3))
    assert (found.count, found.total) == (1, 5)
    for part in ("request 3", "new token 2", repr(found.a), repr(found.b), "1 ulp", "1 of 5 requests"):
        assert part in found.describe()


def test_another_token_is_named_before_the_log_probabilities_behind_it():
    other = Answer((10, 99, 12), (f32(-0.1), f32(-0.7), f32(-0.7)))
    found = first_difference([trial("a"), trial("b", {0: other})])
    assert found is not None
    assert (found.request, found.token, found.quantity, found.a, found.b) == (0, 1, "token id", 11, 99)
    assert found.ulps is None


def test_a_shorter_answer_is_a_difference():
    found = first_difference([trial("a"), trial("b", {2: Answer((12, 13), (f32(-0.3), f32(-0.2)))})])
    assert found is not None
    # f32(-0.1 * 3) and f32(-0.3) are the same float32: only the length differs.
    assert (found.request, found.token, found.quantity, found.a, found.b) == (2, None, "number of tokens", 3, 2)


def test_scores_are_compared_by_their_bits():
    found = first_difference([Trial("a", (Answer((), (0.0,)),)), Trial("b", (Answer((), (-0.0,)),))])
    assert found is not None
    assert (found.quantity, found.token, found.ulps) == ("score", None, 0)
    nan = Trial("a", (Answer((), (math.nan,)),))
    assert first_difference([nan, nan]) is None


def test_trials_of_different_questions_are_refused():
    with pytest.raises(ValueError, match="different things"):
        first_difference([trial("a"), Trial("b", trial("b").answers[:4])])
    with pytest.raises(ValueError, match="no trial"):
        first_difference([])


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [(1.0, 1.0, 0), (1.0, 1.0 + 2**-23, 1), (0.0, -(2**-149), 1), (-1.0, next_f32(-1.0), 1), (math.nan, 1.0, None)],
)
def test_ulps_count_float32_values(a, b, ulps):
    assert float32_ulps(a, b) == ulps


def test_numbers_that_are_no_float32_have_no_distance():
    assert float32_ulps(0.1, 0.1) is None
    assert float32_ulps(1e300, 1.0) is None


def test_the_gap_counts_equal_tokens_and_measures_the_rest():
    gap = gap_between([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -4.25])
    assert (gap.tokens, gap.exact, gap.largest, gap.mean) == (4, 2, 0.5, 0.1875)
    with pytest.raises(ValueError, match="3 and 0"):
        gap_between([1.0, 2.0, 3.0], [])


def findings(**verdicts: str) -> tuple[Finding, ...]:
    return tuple(Finding(level, f"what of {level}", verdict, 1.0) for level, verdict in verdicts.items())


def test_the_level_reached_is_the_last_one_without_a_gap():
    report = Report(findings(D1=KEPT, D2=KEPT, D3=KEPT, D4=UNCHECKED, D5=KEPT, D7=BROKEN))
    assert report.reached == "D3"
    assert report.beyond == ["D5"]
    assert report.obstacle is not None
    assert report.obstacle.startswith("D4 (trainer topology): not checked")
    assert report.exit_code == 0  # nothing that is promised broke: D7 is not promised


def test_one_broken_check_breaks_its_level_and_the_exit_code():
    rows = (
        *findings(D1=KEPT),
        Finding("D3", "rollout", KEPT),
        Finding("D3", "reward", BROKEN, detail="1 ulp", way_out="do"),
    )
    report = Report(rows)
    assert report.verdict("D3") == BROKEN
    assert report.exit_code == 1
    assert "D3 broken" in describe(report)


def test_nothing_checked_reaches_nothing():
    report = Report(())
    assert report.reached is None
    assert report.obstacle == "D1 (repeat): nothing was checked"


def test_the_table_has_a_row_for_each_check_and_the_facts():
    report = Report(findings(D1=KEPT, D7=BROKEN), facts={"torch": "2.13.0"})
    text = describe(report)
    for part in ("level", "what of D1", "kept", "not reached", "1.0 s", "torch: 2.13.0", "level reached: D1 (repeat)"):
        assert part in text
    assert report.as_dict()["levels"]["D7"] == BROKEN


def test_the_way_out_is_shown_only_where_something_is_missing():
    rows = (Finding("D1", "a", KEPT, way_out="never shown"), Finding("D2", "b", UNCHECKED, way_out="start both"))
    text = describe(Report(rows))
    assert "never shown" not in text
    assert "start both" in text
