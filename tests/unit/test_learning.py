"""The learning parts on a random tiny model: reward training, scoring, the policy update and the gate, in seconds."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from reward.errors import RewardModelMismatch, TooFewPairs
from reward.features import LENGTH, FeatureExtractor
from reward.gate import judge_reward
from reward.scoring import RewardModel
from reward.settings import RewardSettings
from reward.training import train_reward_model
from rounds.adapters import load_base
from rounds.errors import AdapterUnknown, NoPrompts, PolicyDiverged
from rounds.likelihood import divergence, token_log_probabilities
from rounds.policy import update_policy
from rounds.sampling import sample
from rounds.settings import CheckpointGateSettings, PolicySettings
from storage.artifacts import read_manifest
from tests.helpers.preferences import Pair, Snapshot, snapshot_of
from tests.helpers.tiny_model import build_tiny_model

SETTINGS = RewardSettings(penalties=(1.0, 10.0), length_scales=(1.0,))
POLICY = PolicySettings(
    max_steps=2,
    prompts_per_step=2,
    completions_per_prompt=4,
    max_new_tokens=8,
    learning_rate=1e-3,
    kl_budget=100.0,
)
PROMPTS = [[{"role": "user", "content": f"question {number}"}] for number in range(6)]


def shorter(first: str, second: str) -> bool:
    return len(first) < len(second)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reward") / "rm-short"
    train_reward_model(snapshot_of(shorter), tiny, out, SETTINGS, None)
    return out


@pytest.fixture(scope="module")
def adapter(tiny: Path, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "flash-r0001-aaaaaa"
    update(tiny, reward_model, out)
    return out


def update(tiny: Path, reward_model: Path, out: Path, **changes: object) -> object:
    arguments: dict[str, object] = {
        "base_model": tiny,
        "parent_adapter": None,
        "reward_model": reward_model,
        "prompts": PROMPTS,
        "out": out,
        "settings": POLICY,
        "seed": 0,
        "lineage": {"round": 1},
    }
    return update_policy(**(arguments | changes))  # type: ignore[arg-type]


def a_taste_that_a_reader_can_see_is_learned_and_released(tiny: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    report = train_reward_model(
        snapshot_of(shorter), tiny, tmp_path / "rm", SETTINGS, None, lambda what, share: shares.append(share)
    )
    assert report.held_out_accuracy > 0.85
    assert report.correlation_with_length < -0.5
    assert judge_reward(report, SETTINGS).passed
    assert shares[-1] == 1.0


def a_set_of_coin_flips_is_refused(tiny: Path, tmp_path: Path) -> None:
    coin = random.Random(1)
    flips = snapshot_of(lambda first, second: coin.random() < 0.5)
    report = train_reward_model(flips, tiny, tmp_path / "rm", SETTINGS, None)
    assert not judge_reward(report, SETTINGS).passed


def a_reward_model_that_learned_coin_flips_falls_below_its_predecessor(
    tiny: Path, reward_model: Path, tmp_path: Path
) -> None:
    coin = random.Random(2)
    flips = snapshot_of(lambda first, second: coin.random() < 0.5)
    clean = snapshot_of(shorter, heldout=80)
    mixed = Snapshot("snap-mixed", flips.train, clean.heldout)
    report = train_reward_model(mixed, tiny, tmp_path / "rm", SETTINGS, reward_model)
    assert report.previous_gain is not None
    assert report.previous_gain < 0
    assert not judge_reward(report, SETTINGS).passed


def too_few_votes_are_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(TooFewPairs, match="3 decided pairs"):
        train_reward_model(Snapshot("s", [Pair()] * 3, [Pair()] * 3), tmp_path, tmp_path / "rm", SETTINGS, None)


def a_stored_reward_model_scores_as_the_trained_one_and_is_standardised(tiny: Path, reward_model: Path) -> None:
    model = RewardModel.load(reward_model, tiny)
    train = snapshot_of(shorter).train
    prompts = [pair.prompt for pair in train for _ in range(2)]
    answers = [text for pair in train for text in (pair.chosen, pair.rejected)]
    scores = model.score(prompts, answers)
    assert scores.dtype == np.float32
    assert scores.mean() == pytest.approx(0, abs=0.05)
    assert scores.std() == pytest.approx(1, abs=0.05)
    wins = model.prefers(prompts[::2], answers[::2], answers[1::2])
    assert (wins > 0.5).mean() > 0.9
    assert not [file for file in reward_model.iterdir() if file.suffix not in {".safetensors", ".json", ""}]


def a_reward_model_refuses_another_base(reward_model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(RewardModelMismatch, match="trained on base"):
        RewardModel.load(reward_model, other)


def an_answer_shorter_than_any_judged_earns_nothing_by_its_length(reward_model: Path, tiny: Path) -> None:
    head = RewardModel.load(reward_model, tiny).head
    low = head.tensors["length_low"]
    row = head.tensors["mean"][None].astype(np.float32)
    shortest, shorter_still = row.copy(), row.copy()
    shortest[:, head.length] = low
    shorter_still[:, head.length] = low / 2
    assert head(shortest) == pytest.approx(head(shorter_still))


def a_feature_does_not_depend_on_the_batch_around_it(tiny: Path) -> None:
    extractor = FeatureExtractor(tiny, SETTINGS)
    answers = ["Yes.", "A rather longer answer to the same question.", "", "Why not?"]
    prompts = [[{"role": "user", "content": "word " * number}] for number in (1, 9, 3, 5)]
    together = extractor(prompts, answers)
    alone = np.vstack([extractor([p], [a]) for p, a in zip(prompts, answers, strict=True)])
    assert together == pytest.approx(alone, abs=0.1)
    assert list(together[:, extractor.groups[LENGTH].start]) == [4, 44, 1, 8]


def a_prompt_that_is_too_long_loses_its_front_and_is_counted(tiny: Path) -> None:
    extractor = FeatureExtractor(tiny, RewardSettings(max_length=64))
    long = extractor([[{"role": "user", "content": "x" * 500 + "the end"}]], ["Yes."])
    assert extractor.truncated == 1
    other = extractor([[{"role": "user", "content": "y" * 500 + "the end"}]], ["Yes."])
    assert np.isfinite(long).all()
    assert long[:, -2:] == pytest.approx(other[:, -2:])


def an_answer_is_as_likely_when_measured_as_when_it_was_sampled(tiny: Path) -> None:
    model, tokenizer = load_base(tiny, "float32")
    prompts = [[{"role": "user", "content": "word " * number}] for number in (1, 7, 3)]
    answers = sample(
        model, tokenizer, prompts, answers_per_prompt=8, max_new_tokens=120, temperature=5.0, batch_size=16
    )
    assert [answer.prompt for answer in answers] == [prompt for prompt in prompts for _ in range(8)]
    lengths = {len(answer.token_ids) for answer in answers}
    assert len(lengths) > 3, "some end early, so the batch shrinks on the way"
    measured = token_log_probabilities(model, answers, pad_token_id=2, temperatures=[5.0, 1.0], rows=5)
    for answer, values in zip(answers, measured, strict=True):
        assert values.shape == (2, len(answer.token_ids))
        assert values[0] == pytest.approx(answer.log_probabilities, abs=1e-3)
        assert answer.finished == (answer.token_ids[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in answer.token_ids[:-1]
        assert divergence(np.asarray(answer.log_probabilities), values[0]) == pytest.approx(0, abs=1e-5)


def a_draw_follows_the_distribution(tiny: Path) -> None:
    model, tokenizer = load_base(tiny, "float32")
    torch.manual_seed(0)
    prompt = [[{"role": "user", "content": "?"}]]
    drawn = sample(
        model, tokenizer, prompt, answers_per_prompt=4000, max_new_tokens=1, temperature=1.0, batch_size=4000
    )
    observed = np.bincount([answer.token_ids[0] for answer in drawn], minlength=259) / len(drawn)
    expected = np.zeros(259)
    for answer in drawn:
        expected[answer.token_ids[0]] = np.exp(answer.log_probabilities[0])
    assert expected.sum() == pytest.approx(1, abs=0.05)
    assert np.abs(observed - expected).max() < 0.03


def the_divergence_estimate_agrees_with_the_exact_one() -> None:
    generator = np.random.default_rng(0)
    policy, base = generator.dirichlet(np.ones(20)), generator.dirichlet(np.full(20, 5.0))
    tokens = generator.choice(20, size=20_000, p=policy)
    exact = float((policy * np.log(policy / base)).sum())
    estimate = divergence(np.log(policy[tokens]), np.log(base[tokens])) / len(tokens)
    assert estimate == pytest.approx(exact, rel=0.1)


def an_adapter_carries_its_lineage_and_canaries_that_differ_from_the_parents(
    tiny: Path, reward_model: Path, adapter: Path
) -> None:
    manifest = read_manifest(adapter)
    assert manifest["lineage"] == {"round": 1}
    assert manifest["reward_model_id"] == reward_model.name
    assert len(manifest["history"]) == POLICY.max_steps + 1
    for canary in manifest["canaries"]:
        assert len(canary["log_probabilities"]) == len(canary["token_ids"]) - 1
        assert canary["log_probabilities"] != canary["parent_log_probabilities"]
    config = (adapter / "adapter_config.json").read_text()
    assert str(tiny.parent) not in config


def a_second_update_starts_from_its_parent(tiny: Path, reward_model: Path, adapter: Path, tmp_path: Path) -> None:
    report = update(tiny, reward_model, tmp_path / "flash-r0002-bbbbbb", parent_adapter=adapter)
    first, second = read_manifest(adapter), read_manifest(tmp_path / "flash-r0002-bbbbbb")
    assert second["parent_adapter"] == adapter.name
    for before, after in zip(first["canaries"], second["canaries"], strict=True):
        assert after["parent_log_probabilities"] == pytest.approx(before["log_probabilities"], abs=0.05)
    assert report.history[0].kl > 0  # type: ignore[attr-defined]


def a_second_update_has_the_budget_on_top_of_its_parents(
    tiny: Path, reward_model: Path, adapter: Path, tmp_path: Path
) -> None:
    first = update(tiny, reward_model, tmp_path / "a", parent_adapter=adapter)
    spent = first.history[0].kl  # type: ignore[attr-defined]
    tight = POLICY.model_copy(update={"kl_budget": 0.9 * spent, "learning_rate": 1e-6, "lora_rank": 4})
    second = update(tiny, reward_model, tmp_path / "b", parent_adapter=adapter, settings=tight)
    assert second.kept_step == POLICY.max_steps  # type: ignore[attr-defined]
    assert read_manifest(tmp_path / "b")["settings"]["lora_rank"] == POLICY.lora_rank  # it has its parent's


def an_update_within_the_budget_keeps_its_last_weights_and_has_measured_them(
    tiny: Path, reward_model: Path, tmp_path: Path
) -> None:
    report = update(tiny, reward_model, tmp_path / "flash-r0001-eeeeee")
    assert report.kept_step == POLICY.max_steps == len(report.history) - 1  # type: ignore[attr-defined]
    assert report.kl == report.history[-1].kl  # type: ignore[attr-defined]


def an_update_over_the_budget_keeps_the_last_weights_within_it(tiny: Path, reward_model: Path, tmp_path: Path) -> None:
    eager = POLICY.model_copy(update={"kl_budget": 0.2, "learning_rate": 1e-3, "max_steps": 20})
    report = update(tiny, reward_model, tmp_path / "flash-r0001-cccccc", settings=eager)
    assert "budget" in report.stopped  # type: ignore[attr-defined]
    kept = report.history[report.kept_step]  # type: ignore[attr-defined]
    assert kept.kl <= 0.2 < report.history[-1].kl  # type: ignore[attr-defined]


def a_budget_that_no_update_can_keep_is_an_error_and_leaves_nothing(
    tiny: Path, reward_model: Path, tmp_path: Path
) -> None:
    hasty = POLICY.model_copy(update={"kl_budget": 1e-6, "max_steps": 3})
    with pytest.raises(PolicyDiverged):
        update(tiny, reward_model, tmp_path / "flash-r0001-dddddd", settings=hasty)
    assert not (tmp_path / "flash-r0001-dddddd").exists()


def an_update_without_prompts_or_with_a_stranger_as_parent_is_refused(
    tiny: Path, reward_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(NoPrompts):
        update(tiny, reward_model, tmp_path / "a", prompts=[])
    with pytest.raises(AdapterUnknown):
        update(tiny, reward_model, tmp_path / "b", parent_adapter=reward_model)


def the_gate_answers_with_both_sides_and_tells_why(tiny: Path, reward_model: Path, adapter: Path) -> None:
    from rounds.checkpoint_gate import judge_checkpoint

    report = judge_checkpoint(
        base_model=tiny,
        parent_adapter=None,
        adapter=adapter,
        reward_model=reward_model,
        prompts=PROMPTS,
        settings=CheckpointGateSettings(max_new_tokens=8),
        seed=0,
    )
    assert len(report.answers) == len(PROMPTS)
    assert report.numbers["kl_per_answer_old"] == pytest.approx(0, abs=1e-3)
    assert report.numbers["kl_per_answer"] > 0
    assert ("passed" if report.passed else "refused") in report.reason
