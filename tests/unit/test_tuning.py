"""Laws of fine-tuned reward models, on a random tiny model: strips, the step, resume, artifacts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flywheel.bench_reward import Work, made_pairs, train_once
from flywheel.reward_page import write_page
from reward.pairs import compare
from reward.scoring import RewardModel
from reward.settings import RewardSettings, TuningSettings
from reward.strips import ChatSequences, pack, shared_front
from reward.training import train_reward_model
from reward.tuning import Collator, load_network, parts_of, tune
from storage.artifacts import read_manifest
from tests.helpers.preferences import Pair, snapshot_of
from tests.helpers.tiny_model import build_tiny_model

TUNING = TuningSettings(epochs=6, learning_rate=5e-3, checkpoint_steps=5, prompts_per_step=4, validation_share=0.2)
SETTINGS = RewardSettings(mode="lora", tuning=TUNING, precision="float32", trick_answers=3)
WHOLE = SETTINGS.model_copy(update={"max_length": 4096})


def shorter(first: str, second: str) -> bool:
    return len(first) < len(second)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reward") / "rm-lora"
    train_reward_model(snapshot_of(shorter), tiny, out, SETTINGS, None)
    return out


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 40))
def every_sequence_lies_in_one_strip_with_its_own_front_and_nothing_else(
    texts: list[list[list[int]]], width: int
) -> None:
    sequences = [sequence for group in texts for sequence in group]
    numbers = iter(range(len(sequences)))
    groups = [[next(numbers) for _ in group] for group in texts]
    strips = pack(groups, sequences, width)
    assert sorted(number for strip in strips for number in strip.sequences) == list(range(len(sequences)))
    for strip in strips:
        for column, number in zip(strip.last.tolist(), strip.sequences, strict=True):
            seen = strip.mask[0, 0, column].nonzero()[:, 0]
            assert strip.input_ids[0, seen].tolist() == sequences[number]
            assert strip.position_ids[0, seen].tolist() == list(range(len(sequences[number])))


def the_front_that_all_share_leaves_each_a_token_of_its_own() -> None:
    assert shared_front([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert shared_front([[1, 2], [1, 2, 3]]) == 1
    assert shared_front([[7]]) == 0


def a_strip_scores_as_the_sequences_alone_do(tiny: Path) -> None:
    network = load_network(tiny, SETTINGS, seed=1).eval()
    encode = ChatSequences(tiny, 512)
    prompt = [{"role": "user", "content": "What is it?"}]
    sequences = [encode(prompt, answer) for answer in ("A cat.", "A cat, and a dog.", "Rain")]
    backbone, head = parts_of(network)
    [strip] = pack([[0, 1, 2]], sequences, 512)
    with torch.inference_mode():
        alone = [float(network(input_ids=torch.tensor([sequence])).logits) for sequence in sequences]
        states = backbone(
            input_ids=strip.input_ids, position_ids=strip.position_ids, attention_mask=strip.mask
        ).last_hidden_state
        together = head(states[0, strip.last])[:, 0]
    assert strip.input_ids.shape[1] < sum(len(sequence) for sequence in sequences)
    assert together.tolist() == pytest.approx(alone, abs=1e-5)


def a_taste_is_learnt_by_fine_tuning_and_the_artifact_scores_as_the_trained_model(tiny: Path, trained: Path) -> None:
    manifest = read_manifest(trained)
    report = manifest["report"]
    assert report["held_out_accuracy"] > 0.85
    assert 0 < report["epochs"] <= TUNING.epochs
    assert not [path for path in trained.parent.iterdir() if path.name.startswith(".")], "scratch is left"
    model = RewardModel.load(trained, tiny)
    prompt = [{"role": "user", "content": "question 7"}]
    answers = ["cat.", "cat dog sun tree rain cat dog sun tree rain."]
    scores = model.score([prompt] * 2, answers)
    assert scores[0] > scores[1]

    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    network = PeftModel.from_pretrained(base, trained).eval()
    ids = ChatSequences(tiny, 512)
    with torch.inference_mode():
        raw = [float(network(input_ids=torch.tensor([ids(prompt, answer)])).logits) for answer in answers]
    tensors = model.head.tensors
    unit = float(np.linalg.norm(tensors["weight"][:64])) / float(torch.linalg.norm(parts_of(network)[1].weight))
    assert scores[0] - scores[1] == pytest.approx(unit * (raw[0] - raw[1]), abs=1e-3)
    assert str(tiny.parent) not in (trained / "adapter_config.json").read_text()


def every_weight_can_be_tuned_and_the_artifact_is_a_whole_model(tiny: Path, tmp_path: Path) -> None:
    full = SETTINGS.model_copy(
        update={"mode": "full", "tuning": TUNING.model_copy(update={"learning_rate": 1e-3, "epochs": 2})}
    )
    train_reward_model(snapshot_of(shorter), tiny, tmp_path / "rm", full, None)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert network.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "rm").chat_template
    assert np.isfinite(RewardModel.load(tmp_path / "rm", tiny).score([[{"role": "user", "content": "?"}]], ["A."])[0])


def a_margin_asks_for_more_and_a_tie_for_nothing(tiny: Path) -> None:
    pairs = compare([Pair(margin=3.0), Pair(tie=True, margin=3.0)], 0.5)
    assert pairs.margin.tolist() == [3.0, 0.0]
    encode = ChatSequences(tiny, 512)
    sequences = [encode(p, a) for p, a in zip(pairs.prompts, pairs.answers, strict=True)]
    batch = Collator(pairs, sequences, 512)([[0, 1]])["batch"]
    assert len(batch.strips) == 1
    assert batch.margin.tolist() == [3.0, 0.0]
    assert batch.weight.tolist() == [1.0, 0.5]
    assert batch.target.tolist() == [1.0, 0.5]


class _Killed(Exception):
    """As far as the files go, a kill."""


def a_run_that_was_killed_goes_on_to_the_very_same_weights(tiny: Path, tmp_path: Path) -> None:
    pairs = compare(snapshot_of(shorter).train, 0.5)
    encode = ChatSequences(tiny, 512)
    whole = tune(pairs, tiny, tmp_path / "whole", SETTINGS, encode, "data")

    def kill(what: str, share: float) -> None:
        if "step 13 " in what:
            raise _Killed

    with pytest.raises(_Killed):
        tune(pairs, tiny, tmp_path / "killed", SETTINGS, encode, "data", kill)
    torn = tmp_path / "killed" / "checkpoint-12"  # one that the kill left half written
    torn.mkdir()
    (torn / "adapter_config.json").write_text("{")
    steps: list[str] = []
    resumed = tune(pairs, tiny, tmp_path / "killed", SETTINGS, encode, "data", lambda what, share: steps.append(what))
    assert steps[0].startswith("tuning, step 11 ")
    first, second = (dict(one.network.named_parameters()) for one in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def a_killed_run_of_other_data_or_settings_is_not_gone_on_with(tiny: Path, tmp_path: Path) -> None:
    pairs = compare(snapshot_of(shorter).train, 0.5)
    encode = ChatSequences(tiny, 512)
    once = SETTINGS.model_copy(update={"tuning": TUNING.model_copy(update={"epochs": 1})})
    tune(pairs, tiny, tmp_path / "run", once, encode, "data")
    steps: list[str] = []
    tune(pairs, tiny, tmp_path / "run", once, encode, "other data", lambda what, share: steps.append(what))
    assert steps[0].startswith("tuning, step 1 ")


def a_fine_tuned_model_is_compared_with_a_frozen_one_before_it(tiny: Path, trained: Path, tmp_path: Path) -> None:
    frozen = RewardSettings(penalties=(1.0, 10.0), length_scales=(1.0,), trick_answers=0)
    report = train_reward_model(snapshot_of(shorter), tiny, tmp_path / "rm", frozen, trained)
    assert report.previous_accuracy is not None
    assert report.previous_accuracy > 0.85
    assert report.previous_disagreement is not None
    assert report.linear_accuracy is not None
    assert report.evaluation is not None
    assert report.evaluation.accuracy == pytest.approx(report.held_out_accuracy)


def a_report_s_page_shows_its_plots_and_loads_nothing(trained: Path, tmp_path: Path) -> None:
    report = read_manifest(trained)["report"]
    write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 3
    assert "flattery" in page
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=[\"']http", page)


def the_bench_shows_both_trainers_the_same_pairs(tiny: Path) -> None:
    heldout = made_pairs(10, seed=2)
    work = Work(tiny, WHOLE, made_pairs(12, seed=1), heldout, steps=3, pairs_per_step=4)
    trl, ours = (train_once(name, work, judged=True) for name in ("trl", "flywheel"))
    assert ours["losses"] == pytest.approx(trl["losses"], abs=1e-3)
    assert ours["pair_tokens"] == trl["pair_tokens"]
    assert ours["computed_tokens_per_pair"] < 0.75 * trl["computed_tokens_per_pair"]
    assert ours["accuracy"] == trl["accuracy"]
