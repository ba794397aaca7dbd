"""A snapshot's Parquet files go into TRL's trainers as they are."""

from pathlib import Path
from typing import Any

import pytest

from feedback.snapshots import create_snapshot
from tests.helpers.events_built import build_comparison, build_preference
from tests.helpers.ledger import insert
from tests.helpers.tiny_model import build_tiny_model

pytestmark = pytest.mark.real


def train(kind: str, model: Path, dataset: Any, folder: Path) -> float:
    """One step; the loss."""
    import trl
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    trainer_type, config_type = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    loader = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    options = {"num_labels": 1} if kind == "Reward" else {}
    trainer = trainer_type(
        model=loader.from_pretrained(model, **options),
        args=config_type(
            output_dir=str(folder),
            max_steps=1,
            per_device_train_batch_size=4,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            max_length=256,
        ),
        train_dataset=dataset["train"],
        eval_dataset=dataset["heldout"],
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    return float(trainer.train().training_loss)


@pytest.mark.parametrize("kind", ["Reward", "DPO", "KTO"])
def a_snapshot_feeds_a_trainer_of_trl_without_conversion(tmp_path: Path, dsn: str, kind: str) -> None:
    from datasets import load_dataset

    for number in range(24):
        comparison, answers = build_comparison(f"question {number}", ("a good answer", "a bad answer"))
        insert(dsn, [*answers, build_preference(comparison, answers[0].response_id)])
    snapshot = create_snapshot(dsn, tmp_path)
    files = {side: str(snapshot.path / f"{side}.parquet") for side in ("train", "heldout")}
    dataset = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    loss = train(kind, build_tiny_model(tmp_path / "model"), dataset, tmp_path / "out")
    assert 0 < loss < 10
