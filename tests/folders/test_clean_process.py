"""A folder loads in a fresh process without the package."""

import pytest
import torch
from common import BYTE_VOCAB_SIZE, save_text_model

from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.clean_process import load_in_clean_process, probe_tokens


def test_weights_logits_and_tokenizer(tmp_path):
    model = save_text_model(tmp_path, "projected_block", tie_word_embeddings=True)
    found = load_in_clean_process(tmp_path)
    tokens = probe_tokens(model.config)
    torch.testing.assert_close(found["output"], model(tokens).logits)
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=1)
    assert torch.equal(found["tokens"], expected) and expected.shape == (1, 9)
    assert found["tokenizer_size"] == BYTE_VOCAB_SIZE
    assert found["missing_weights"] == found["unexpected_weights"] == found["bad_weights"] == []


def test_code_that_needs_the_package(tmp_path):
    save_text_model(tmp_path)
    code = tmp_path / "depth_routing.py"
    code.write_text(f"import lr_attnres\n{code.read_text()}")
    with pytest.raises(LRAttnResError, match="does not load in a clean process: .*lr_attnres"):
        load_in_clean_process(tmp_path)
