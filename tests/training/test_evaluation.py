"""The loss of a split is the mean over all its targets, for any batch size."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from common import BYTE_VOCAB_SIZE, byte_tokenizer, perturb, save_text_model, small_model
from torch.utils.data import Subset
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig

from lr_attnres import upgrade_model
from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.training.evaluation import Evaluation, evaluate, evaluate_model
from lr_attnres.training.losses import use_chunked_loss


@pytest.fixture
def model():
    return small_model("projected_block", vocab_size=BYTE_VOCAB_SIZE)


def test_is_the_mean_over_the_targets(model, token_data):
    """Against float64 log-probabilities, row by row; seven rows in batches of two leave one row. No z-loss."""
    rows = Subset(PackedTokens(token_data), range(7))
    total, num_targets = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0, :-1].double()
            targets = row["labels"][1:]
            chosen = logits.log_softmax(-1)[torch.arange(len(targets)), targets.clamp(min=0)]
            total -= chosen[targets >= 0].sum().item()
            num_targets += (targets >= 0).sum().item()

    use_chunked_loss(model, z_loss=0.5)
    model.train()
    results = [evaluate_model(model, rows, Accelerator(cpu=True), batch_size) for batch_size in (1, 2, 7, 50)]
    for result in results:
        assert result.tokens == num_targets
        assert result.loss == pytest.approx(total / num_targets, abs=1e-6)
        assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert model.training and model.chunked_loss.z_loss == 0.5


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_after_another_accelerator_of_this_process(precision, token_data, tmp_path):
    """As after `train` on a GPU: a folder is evaluated in its own precision."""
    model = save_text_model(tmp_path / "model")
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(mixed_precision=precision)
    expected = evaluate_model(model, PackedTokens(token_data, "validation"), Accelerator())
    assert evaluate(tmp_path / "model", token_data) == expected
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_original_of_an_upgraded_model(token_data, tmp_path):
    """An ordinary model of Transformers is measured on the same tokens, so both losses are the same."""
    config = LlamaConfig(
        vocab_size=BYTE_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    llama = perturb(LlamaForCausalLM(config))
    llama.save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    upgraded = upgrade_model(tmp_path / "llama", tmp_path / "upgraded", depth_key_rank=8)
    original, routed = evaluate(tmp_path / "llama", token_data), evaluate(upgraded, token_data)
    assert original.tokens == routed.tokens and original.loss == pytest.approx(routed.loss, rel=1e-5)
    (tmp_path / "llama/model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        evaluate(tmp_path / "llama", token_data)
    ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="holds a vit model, which is no causal language model"):
        evaluate(tmp_path / "vit", token_data)


def test_folders_that_do_not_fit(model, token_data, tmp_path):
    small_model(vocab_size=100).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="`vocab_size` is 100, but the data has 257 different tokens"):
        evaluate(tmp_path / "words", token_data)
    small_model(vocab_size=300, max_position_embeddings=16).save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match="`max_position_embeddings` is 16, less than a row"):
        evaluate(tmp_path / "short", token_data)
    with pytest.raises(ValueError, match="no split 'test'"):
        evaluate(tmp_path / "short", token_data, split="test")
    for size in (0, 10**9):
        with pytest.raises(ValueError, match=f"`batch_size` is {size}; it must lie in 1..10000 rows"):
            evaluate(tmp_path / "short", token_data, batch_size=size)


def test_a_loss_that_is_no_number(token_data, tmp_path):
    model = save_text_model(tmp_path / "model")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(3e38)  # finite, but its products are not
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="the loss of .*model is nan: weights are damaged"):
        evaluate(tmp_path / "model", token_data)


def test_data_of_another_tokenizer_and_missing_weights(token_data, tmp_path, capsys):
    save_text_model(tmp_path / "model")
    evaluate(tmp_path / "model", token_data)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="prepared with another tokenizer"):
        evaluate(tmp_path / "model", token_data)
    small_model(vocab_size=BYTE_VOCAB_SIZE).save_pretrained(tmp_path / "bare")
    evaluate(tmp_path / "bare", token_data)
    assert "bare has no tokenizer_config.json" in capsys.readouterr().err
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match="lacks|cannot be loaded"):
        evaluate(tmp_path / "model", token_data)


def test_flash_attention_gets_single_rows(model, token_data):
    """It separates documents only in a batch of one row; the loss is the same."""
    rows = Subset(PackedTokens(token_data), range(5))
    expected = evaluate_model(model, rows, Accelerator(cpu=True), 2)
    shapes = []
    model.config._attn_implementation_internal = "flash_attention_2"
    model.register_forward_pre_hook(lambda *_: shapes.append(_[2]["input_ids"].shape), with_kwargs=True)
    model.model.register_forward_pre_hook(lambda *_: use_sdpa(model))
    assert evaluate_model(model, rows, Accelerator(cpu=True), 2).loss == pytest.approx(expected.loss, abs=1e-6)
    assert shapes[0][0] == 1


def use_sdpa(model):
    """Flash attention cannot run on a CPU: another implementation computes with its inputs."""
    model.config._attn_implementation_internal = "sdpa"


def test_a_hopeless_loss_has_an_infinite_perplexity():
    assert Evaluation(1e4, 1).perplexity == math.inf
