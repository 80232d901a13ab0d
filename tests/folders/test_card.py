"""The card has valid metadata, the exact cost of its config, and nothing that is not recorded."""

import json
import re

import pytest
from common import VARIANTS, small_config
from huggingface_hub import ModelCard

from lr_attnres import LRAttnResConfig
from lr_attnres.analysis.cost import depth_cost
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.card import model_card, read_provenance, write_provenance


def card_of(folder, config: LRAttnResConfig, **options) -> ModelCard:
    config.architectures = config.architectures or ["LRAttnResForCausalLM"]
    card = model_card(folder, config, "name", **options)
    return ModelCard(str(card))  # parsed again, as the Hub does


@pytest.mark.parametrize("variant", VARIANTS)
def test_cost_of_the_config(variant, tmp_path):
    config = small_config(variant)
    text, cost = str(card_of(tmp_path, config)), depth_cost(config)
    assert f" {cost.added_flops_percent:.4f} % of the core\n" in text
    assert re.search(rf"added parameters +{cost.added_parameters:,} ", text)
    assert re.search(rf"source reads +{cost.source_reads:,}\n", text)
    assert "Data and recipe are not recorded." in text and "## Evaluation" not in text


def test_published_percentage(tmp_path):
    assert " 0.0932 % of the core\n" in str(card_of(tmp_path, LRAttnResConfig()))


def test_metadata_and_origin(tmp_path):
    results = [{"dataset": "lambada", "metric": "perplexity", "value": 21.5}]
    write_provenance(
        tmp_path,
        source="owner/released, final_model.pt",
        step=1200,
        tokens=5_000_000,
        license="apache-2.0",
        language=["en"],
        datasets=["owner/text"],
        recipe={"optimizer": "Muon"},
        evaluation=results,
    )
    card = card_of(tmp_path, small_config(), tags=["mine"])
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["custom_code", "lr_attnres", "sliced", "mine"]
    assert (card.data.license, card.data.language, card.data.datasets) == ("apache-2.0", ["en"], ["owner/text"])
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("lambada", "perplexity", 21.5)
    for row in ("| training step | 1,200 |", "| training tokens | 5,000,000 |", "| optimizer | Muon |"):
        assert row in card.text
    assert "| converted from | owner/released, final_model.pt |" in card.text
    assert "| lambada, perplexity | 21.5 |" in card.text


def test_snippet(tmp_path):
    text = card_of(tmp_path, small_config(), repo_id="owner/name", revision="contents-0123").text
    assert '"owner/name", revision="contents-0123", trust_remote_code=True)' in text
    assert "AutoTokenizer" not in text  # there is none
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert (
        'AutoTokenizer.from_pretrained("path/to/this/folder", trust_remote_code=True)'
        in card_of(tmp_path, small_config()).text
    )
    heads = card_of(tmp_path, small_config(architectures=["LRAttnResForTokenClassification"]))
    assert heads.data.pipeline_tag == "token-classification"
    assert "AutoModelForTokenClassification.from_pretrained" in heads.text and "generate" not in heads.text


BAD = [
    ("{", "is not JSON"),
    ("[]", "is not a JSON object"),
    ('{"steps": 3}', "has the unknown field 'steps'; known are source, step"),
    ('{"step": "3"}', "step is '3'; expected int"),
    ('{"evaluation": [{"dataset": "x"}]}', "expected dataset, metric and value"),
]


@pytest.mark.parametrize("content, message", BAD, ids=[row[1] for row in BAD])
def test_provenance_that_cannot_be_used(content, message, tmp_path):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(LRAttnResError, match=message):
        read_provenance(tmp_path)


def test_provenance_leaves_out_what_is_unknown(tmp_path):
    write_provenance(tmp_path, step=3, tokens=None)
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"step": 3} == read_provenance(tmp_path)
    assert read_provenance(tmp_path / "absent") == {}
