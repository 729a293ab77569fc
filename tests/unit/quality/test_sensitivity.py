"""The choice of bits: the budget holds, and what suffers most per weight keeps more bits."""

import pytest

from coordinator.quality.quantize import quantize_options
from coordinator.quality.sensitivity import Group, Sensitivity, choose_bits
from worker.errors import InputError

OPTIONS = quantize_options("affine", 4, 64, ())


def part(name: str, num_weights: int, loss: float, drafts: float | None = None) -> Sensitivity:
    return Sensitivity(Group(name, (name,), num_weights), loss, drafts)


def names(found: list[Sensitivity], target: float) -> set[str]:
    num = sum(each.group.num_weights for each in found)
    high = choose_bits(found, OPTIONS, num=num, nbytes=2 * num, target=target)
    num_high = sum(each.group.num_weights for each in high)
    assert 4.5 + 4 * num_high / num <= target  # 0.5: a scale and a bias for 64 weights
    return {each.group.name for each in high}


def test_what_suffers_most_per_weight_gets_more_bits_within_the_budget() -> None:
    found = [part("large", 6400, 0.3), part("small", 640, 0.2), part("calm", 640, 0.001), part("better", 640, -0.5)]
    assert names(found, 4.5) == set()
    assert names(found, 4.9) == {"small"}
    assert names(found, 5.3) == {"small", "calm"}  # the large one is over the budget
    assert names(found, 8.5) == {"large", "small", "calm", "better"}


def test_drafts_that_no_longer_hold_count_like_the_loss() -> None:
    found = [part("drafts", 640, 0.1, 0.9), part("loss", 640, 0.2, 0.0), part("rest", 640, 0.05, 0.01)]
    assert names(found, 6.0) == {"drafts"}


@pytest.mark.parametrize("target", [4.4, 8.6])
def test_a_target_beyond_the_low_or_the_high_bits_is_refused(target: float) -> None:
    with pytest.raises(InputError) as refusal:
        names([part("all", 640, 0.1)], target)
    assert refusal.value.field == "target_bpw"
