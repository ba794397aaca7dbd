"""Laws of the split: a function of the prompt alone, near the share asked for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.events import prompt_hash
from feedback.snapshots import side_of


@settings(deadline=None)
@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def a_larger_share_only_adds_prompts_to_the_held_out_side(prompt: str, first: float, second: float) -> None:
    small, large = sorted((first, second))
    assert side_of(prompt, small) == "train" or side_of(prompt, large) == "heldout"


def the_held_out_side_has_about_its_share_of_prompts() -> None:
    hashes = [prompt_hash([{"role": "user", "content": str(number)}]) for number in range(4000)]
    held_out = sum(side_of(value, 0.25) == "heldout" for value in hashes)
    assert abs(held_out / 4000 - 0.25) < 0.03  # more than four standard deviations
    assert all(side_of(value, 0.0) == "train" and side_of(value, 1.0) == "heldout" for value in hashes)
