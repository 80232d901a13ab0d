"""The loss of a split is the mean over all its targets, whatever the batches."""

import math

import pytest
import torch
from accelerate import Accelerator
from common import BYTE_VOCAB_SIZE, small_model
from torch.utils.data import Subset

from lr_attnres.data import PackedTokens
from lr_attnres.evaluation import evaluate, evaluate_folder
from lr_attnres.losses import use_chunked_loss


@pytest.fixture
def model():
    return small_model("projected_block", vocab_size=BYTE_VOCAB_SIZE)


def test_is_the_mean_over_the_targets(model, token_data):
    """Against log-probabilities in float64, row by row; seven rows leave a batch of one. Z-loss is left out."""
    rows = Subset(PackedTokens(token_data), range(7))
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0, :-1].double()
            targets = row["labels"][1:]
            chosen = logits.log_softmax(-1)[torch.arange(len(targets)), targets.clamp(min=0)]
            total, count = total - chosen[targets >= 0].sum().item(), count + (targets >= 0).sum().item()

    use_chunked_loss(model, z_loss=0.5)
    model.train()
    results = [evaluate(model, rows, Accelerator(cpu=True), batch_size) for batch_size in (1, 2, 7, 50)]
    for result in results:
        assert result.tokens == count
        assert result.loss == pytest.approx(total / count, abs=1e-6)
        assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert model.training and model.chunked_loss.z_loss == 0.5


def test_folders_that_do_not_fit(model, token_data, tmp_path):
    small_model(vocab_size=100).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="`vocab_size` is 100, but the data has 257 different tokens"):
        evaluate_folder(tmp_path / "words", token_data)
    small_model(vocab_size=300, max_position_embeddings=16).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="`max_position_embeddings` is 16, less than a row"):
        evaluate_folder(tmp_path / "short", token_data)
    with pytest.raises(ValueError, match="no split 'test'"):
        evaluate_folder(tmp_path / "short", token_data, split="test")
    with pytest.raises(ValueError, match="`batch_size` is 0"):
        evaluate_folder(tmp_path / "short", token_data, batch_size=0)
