"""The statistics equal a direct computation for any batch size; the command writes and draws them."""

import json
import math
import weakref

import pytest
import torch
from common import ROUTED, VARIANTS, byte_tokenizer, random_tokens, save_text_model, small_config, small_model
from safetensors.torch import load_file

from lr_attnres import LRAttnResForCausalLM, analyze, analyze_model, cli, depth_cost, effective_sources
from lr_attnres.analysis.routing import average_gradient_norm, model_names
from lr_attnres.data.held_out import make_batches, open_rows, take_tokens, text_rows
from lr_attnres.data.packed_tokens import PackedTokens
from lr_attnres.data.packing import prepare_data
from lr_attnres.data.tokenizers import train_tokenizer
from lr_attnres.depth_routing import depth_block_ends
from lr_attnres.training.losses import use_chunked_loss


def rows(count: int, length: int = 9) -> list[dict]:
    positions = torch.cat([torch.arange(4), torch.arange(length - 4)])  # two documents
    tokens = random_tokens(count, length)
    return [
        {"input_ids": row, "position_ids": positions, "labels": row.masked_fill(positions == 0, -100)}
        for row in tokens
    ]


# sources of sites 1..8: all that have been written, or 3 blocks that end after sub-layers 3, 6 and 8
SOURCES = {None: [2, 3, 4, 5, 6, 7, 8, 9], 3: [2, 2, 2, 3, 3, 3, 4, 4]}


def test_the_model_is_left_as_it_was():
    model = small_model(attention_dropout=0.5).train()
    use_chunked_loss(model, z_loss=0.5)
    data = rows(3)
    losses = [analyze_model(model, make_batches(data, 2)).loss for _ in range(2)]
    assert losses[0] == losses[1] and model.training and model.chunked_loss.z_loss == 0.5


@pytest.mark.parametrize("variant", ROUTED)
def test_zero_queries_use_all_sources(variant):
    model = LRAttnResForCausalLM(small_config(variant)).eval()
    analysis = analyze_model(model, make_batches(rows(3), 2))
    effective = analysis.tensors["effective_sources"]
    expected = torch.tensor(SOURCES[VARIANTS[variant]["num_depth_blocks"]]).double()
    torch.testing.assert_close(effective, expected, rtol=1e-14, atol=0)
    assert (analysis.tensors["query_norms"] == 0).all()


def test_a_peaked_query_uses_one_source():
    assert effective_sources(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])).tolist() == [1.0, 1.0]
    model = small_model("sliced_full")
    with torch.no_grad():
        model.model.depth_queries.weight.mul_(1e6)
    effective = analyze_model(model, make_batches(rows(2), 2)).tensors["effective_sources"]
    torch.testing.assert_close(effective, torch.ones(8, dtype=torch.float64), atol=1e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", ROUTED)
def test_routing_agrees_with_a_float64_computation(variant):
    model, data = small_model(variant).double(), rows(5)
    tensors = analyze_model(model, make_batches(data, 2)).tensors
    batch = torch.utils.data.default_collate(data)
    weights = model(
        batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, output_depth_weights=True
    ).depth_weights
    close = {"atol": 1e-6, "rtol": 1e-6}  # everything is float64 except for the rotary angles, which are float32
    heads = model.config.depth_heads
    for site, site_weights in enumerate(weights):
        reads = site_weights.flatten(0, -2).tolist()  # of all tokens and, inside a token, of all heads
        entropies = [-sum(w * math.log(w) for w in read if w > 0) for read in reads]
        expected = sum(map(math.exp, entropies)) / len(entropies)
        if heads > 1:
            of_last_head = [math.exp(entropy) for entropy in entropies[heads - 1 :: heads]]
            mean_of_last_head = sum(of_last_head) / len(of_last_head)
            assert tensors["head_effective_sources"][site, -1].item() == pytest.approx(mean_of_last_head, rel=1e-6)
            mean = site_weights.mean((0, 1))
            torch.testing.assert_close(tensors["head_depth_weights"][site, :, : mean.shape[-1]], mean, **close)
            entropies = [sum(entropies[i : i + heads]) / heads for i in range(0, len(entropies), heads)]
            site_weights = site_weights.mean(2)
        assert tensors["effective_sources"][site].item() == pytest.approx(expected, rel=1e-6)
        assert tensors["entropy"][site].item() == pytest.approx(sum(entropies) / len(entropies), rel=1e-6)
        mean = site_weights.mean((0, 1))
        torch.testing.assert_close(tensors["depth_weights"][site, : len(mean)], mean, **close)
        assert tensors["depth_weights"][site, len(mean) :].isnan().all()
        by_position = torch.tensor(entropies).view(5, 9)
        # positions 0..3 occur in both documents, position 4 only in the second
        assert tensors["entropy_by_position"][site, 4].item() == pytest.approx(
            by_position[:, 8].mean().item(), rel=1e-5
        )
        first = (by_position[:, 0] + by_position[:, 4]).mean().item() / 2
        assert tensors["entropy_by_position"][site, 0].item() == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("variant", ROUTED)
def test_shares_divide_the_weight(variant):
    tensors = analyze_model(small_model(variant), make_batches(rows(2), 2)).tensors
    shares, weights = tensors["shares"], tensors["depth_weights"]
    torch.testing.assert_close(shares.sum(-1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(shares[:, 0], weights[:, 0])
    ends = depth_block_ends(8, VARIANTS[variant]["num_depth_blocks"])
    for site in range(1, 9):
        partial = 0.0 if site in ends else weights[site - 1][~weights[site - 1].isnan()][-1].item()
        assert shares[site - 1, 2].item() == partial


@torch.no_grad()
@pytest.mark.parametrize("variant", ["standard", "projected_block", "sliced_full"])
def test_output_magnitudes_follow_their_sub_layers(variant):
    model, data = small_model(variant), rows(3)
    before = analyze_model(model, make_batches(data, 2)).tensors["output_magnitude"]
    embedding = model.model.embed_tokens(torch.stack([row["input_ids"] for row in data]))
    assert before[0].item() == pytest.approx(embedding.square().mean(-1).sqrt().mean().item(), rel=1e-5)
    model.model.layers[-1].mlp.down_proj.weight[: model.config.hidden_size] *= 3
    after = analyze_model(model, make_batches(data, 2)).tensors["output_magnitude"]
    expected = before.clone()
    expected[-1] *= 3
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["standard", "sliced_block"])
def test_loss_and_batches(variant):
    """One batch or many give the same means, and the loss of the model itself."""
    model, data = small_model(variant), rows(6)
    expected = model(**torch.utils.data.default_collate(data), use_cache=False).loss.item()
    runs = [analyze_model(model, make_batches(data, size)) for size in (1, 4, 6)]
    for run in runs:
        assert run.tokens == 54 and run.loss == pytest.approx(expected, rel=1e-5)
        for name, tensor in run.tensors.items():
            torch.testing.assert_close(tensor, runs[0].tensors[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert run.added_flops_percent == depth_cost(model.config).added_flops_percent


def test_batches_are_let_go():
    """No reference to a batch is kept: the memory does not grow with the number of tokens."""
    seen = []

    def batches():
        for _ in range(6):
            assert sum(reference() is not None for reference in seen) <= 1  # the loop still holds the last one
            (batch,) = make_batches(rows(2), 2)
            seen.append(weakref.ref(batch["input_ids"]))
            yield batch
            del batch

    analyze_model(small_model(), batches())
    assert len(seen) == 6


def test_gradient_norm_is_averaged_over_the_logged_steps(tmp_path):
    steps = [{"step": 1, "grad_norm": 2.0}, {"step": 2, "validation_loss": 3.0}, {"step": 3, "grad_norm": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 4, "gr')
    assert average_gradient_norm(tmp_path) == average_gradient_norm(tmp_path / "model") == 1.5
    assert average_gradient_norm(tmp_path / "checkpoints/step-00000003") == 1.5
    assert average_gradient_norm(tmp_path / "elsewhere/model") is None


def test_text_is_packed_as_prepare_packs_it(tmp_path):
    texts = [
        "A short one.",
        " \n",
        "It ends <|end|> not here.",
        "Another document, which is a little longer.\n" * 5,
        "x",
        "The last.\nOf them.",
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_data(
        tmp_path / "texts.jsonl",
        tmp_path / "data",
        byte_tokenizer(),
        None,
        16,
        validation_fraction=0,
        progress_bar=False,
    )
    packed = PackedTokens(tmp_path / "data", "train")
    ours = list(text_rows(texts, byte_tokenizer(), 16))
    assert len(ours) == len(packed) + 1 and len(ours[-1]["input_ids"]) < 16
    for row, expected in zip(ours, packed):
        assert all(torch.equal(row[name], expected[name]) for name in expected)


def test_rows_of_another_tokenizer_are_refused(token_data, tmp_path):
    """The vocabularies may have the same size and yet different tokens."""
    model = save_text_model(tmp_path / "model")
    assert next(iter(open_rows(str(token_data), str(tmp_path / "model"), model.config)))
    other = train_tokenizer(["A text of few words."], 257)
    other.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="was prepared with another tokenizer than that of"):
        open_rows(str(token_data), str(tmp_path / "model"), model.config)


def test_long_documents_are_tokenized_in_pieces(monkeypatch):
    text = "".join(f"line {i}\n" for i in range(50))
    expected = list(text_rows([text], byte_tokenizer(), 16))
    monkeypatch.setattr("lr_attnres.data.held_out.PIECE_CHARACTERS", 20)
    for row, other in zip(text_rows([text], byte_tokenizer(), 16), expected, strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)


@pytest.mark.parametrize("max_tokens, taken", [(None, 45), (45, 45), (30, 27), (1, 9)])
def test_take_tokens(max_tokens, taken):
    batches = take_tokens(make_batches(rows(5), 2), max_tokens)
    assert sum(batch["input_ids"].numel() for batch in batches) == taken


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for variant in ("standard", "sliced_block", "projected_full"):
        save_text_model(folder / variant, variant)
    (folder / "projected_full/metrics.jsonl").write_text('{"step": 1, "grad_norm": 0.5}\n')
    (folder / "text.txt").write_text("Four score and seven years ago our fathers brought forth. " * 30)
    return folder


def test_command_writes_numbers_and_figures(folders, tmp_path, capsys):
    sources = [str(folders / name) for name in ("standard", "sliced_block", "projected_full")]
    options = ["--data", str(folders / "text.txt"), "--output", str(tmp_path / "out"), "--device", "cpu"]
    arguments = ["analyze", *sources, *options, "--sequence-length", "64", "--max-tokens", "640"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:3]] == ["standard", "sliced-n3-r8", "projected-full-r8"]
    assert "gradient norm 0.5000" in lines[2]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    figures = ["depth_weights", "effective_sources", "entropy_by_position", "gradient_norms", "loss_against_flops"]
    figures += ["output_magnitude", "query_norms", "shares"]
    models = ["projected-full-r8", "sliced-n3-r8", "standard"]
    assert names == sorted([*models, *(f"{name}{end}" for name in figures for end in (".png", ".svg"))])
    for path in (tmp_path / "out").glob("*.*"):
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    saved = json.loads((tmp_path / "out/sliced-n3-r8/analysis.json").read_text())
    tensors = load_file(tmp_path / "out/sliced-n3-r8/analysis.safetensors")
    assert saved["tokens"] == 640 and len(saved["effective_sources"]) == 8
    assert tensors["effective_sources"].tolist() == saved["effective_sources"]
    assert tensors["depth_weights"].dtype == torch.float64 and tensors["depth_weights"].shape == (8, 4)

    assert cli.main(arguments) == 1
    assert "exists already; choose a folder that does not." in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-tokens", "0"], "`max_tokens` is 0; it must be at least 1."),
        (["--batch-size", "0"], "`batch_size` is 0; it must lie in 1..10000 rows."),
        (["--batch-size", "1000000000"], "`batch_size` is 1000000000; it must lie in 1..10000 rows."),
        (["--sequence-length", "1"], "`sequence_length` is 1; it must lie in 2..256, the context of "),
        (["--sequence-length", "300"], "`sequence_length` is 300; it must lie in 2..256, the context of "),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (["--data", "EMPTY"], "`data` has no tokens."),
    ],
    ids=str,
)
def test_command_refuses_and_leaves_nothing(options, message, folders, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    options = [str(tmp_path / "empty.txt") if option == "EMPTY" else option for option in options]
    arguments = ["--data", str(folders / "text.txt"), "--output", str(tmp_path / "out"), "--device", "cpu", *options]
    assert cli.main(["analyze", str(folders / "sliced_block"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_two_models_of_one_variant_have_different_names(tmp_path):
    for name in ("first/model", "second/model", "other"):
        small_config("sliced_block").save_pretrained(tmp_path / name)
    first, second, other = (str(tmp_path / name) for name in ("first/model", "second/model", "other"))
    assert model_names([first]) == ["sliced-n3-r8"]
    assert model_names([first, other]) == ["sliced-n3-r8 (model)", "sliced-n3-r8 (other)"]
    assert model_names([first, second]) == ["sliced-n3-r8 (first/model)", "sliced-n3-r8 (second/model)"]
    with pytest.raises(ValueError, match="the same model is given twice"):
        model_names([first, first])


def test_data_that_does_not_fit_and_weights_that_are_not_numbers(token_data, tmp_path):
    save_text_model(tmp_path / "short", num_hidden_layers=1).config.save_pretrained(tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text()) | {"max_position_embeddings": 16}
    (tmp_path / "short/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="`max_position_embeddings` is 16, less than a row"):
        analyze([str(tmp_path / "short")], str(token_data), tmp_path / "out", device="cpu")
    model = save_text_model(tmp_path / "broken")
    model.model.layers[0].mlp.down_proj.weight.data.fill_(3e38)  # finite, but its products are not
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match="the loss of sliced-n3-r8 is nan: the weights are damaged"):
        analyze([str(tmp_path / "broken")], str(token_data), tmp_path / "out", device="cpu")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written: .*file is not a folder that you may write to"):
        analyze(["unread"], "unread", tmp_path / "file/out")
    assert not (tmp_path / "out").exists()
