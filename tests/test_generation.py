"""Caches and decoding: a token's routing uses only its own sources, so every Transformers cache works unchanged."""

import pytest
import torch
from common import ONE_OF_EACH, ROUTED, VARIANTS, random_tokens, small_model
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache


# No token ends a text. Not None, which prompt lookup takes amiss in Transformers 5.10.
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": 0}


@pytest.mark.law
@pytest.mark.compatibility("Dynamic cache")
@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_logits_equal_uncached(variant):
    model, input_ids = small_model(variant).double(), random_tokens(2, 12)
    with torch.no_grad():
        expected = model(input_ids).logits
        outputs = model(input_ids[:, :5], use_cache=True)
        pieces = [outputs.logits]
        for start, end in ((5, 6), (6, 10), (10, 11), (11, 12)):
            outputs = model(input_ids[:, start:end], past_key_values=outputs.past_key_values, use_cache=True)
            pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


@pytest.mark.law
@pytest.mark.compatibility("Greedy")
@pytest.mark.compatibility("No cache")
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_argmax_without_a_cache(variant):
    model, input_ids = small_model(variant).double(), random_tokens(2, 5)
    expected = input_ids
    for _ in range(GREEDY["max_new_tokens"]):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(input_ids, **GREEDY), expected)
    assert torch.equal(model.generate(input_ids, use_cache=False, **GREEDY), expected)


@pytest.mark.law
@pytest.mark.compatibility("Left-padded batch")
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padded_batch_generates_what_each_row_generates_alone(variant):
    model, short, long = small_model(variant).double(), random_tokens(1, 3), random_tokens(1, 6)
    batch = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1), long])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    together = model.generate(batch, attention_mask=mask, **GREEDY)
    assert torch.equal(together[:1, 6:], model.generate(short, **GREEDY)[:, 3:])
    assert torch.equal(together[1:, 6:], model.generate(long, **GREEDY)[:, 6:])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"cache_implementation": "static", "disable_compile": True},
            marks=pytest.mark.compatibility("Static cache"),
        ),
        pytest.param({"prompt_lookup_num_tokens": 3}, marks=pytest.mark.compatibility("Prompt lookup")),
        pytest.param(
            {"assistant_early_exit": 2},
            marks=pytest.mark.compatibility("Assisted by its own first layers (`assistant_early_exit`)"),
        ),
        pytest.param({"num_beams": 1, "prefill_chunk_size": 3}, marks=pytest.mark.compatibility("Prefill in chunks")),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_modes_that_must_equal_greedy(variant, options):
    model, input_ids = small_model(variant).double(), random_tokens(1, 7)
    assert torch.equal(model.generate(input_ids, **GREEDY, **options), model.generate(input_ids, **GREEDY))


@pytest.mark.compatibility("Assisted by another model")
@pytest.mark.parametrize("variant", VARIANTS)
def test_assisted_decoding_equals_greedy(variant):
    model, input_ids = small_model(variant).double(), random_tokens(1, 7)
    for draft in (small_model("standard").double(), small_model("projected_full").double()):
        assert torch.equal(
            model.generate(input_ids, assistant_model=draft, **GREEDY), model.generate(input_ids, **GREEDY)
        )


@pytest.mark.compatibility("Beam search")
@pytest.mark.parametrize("variant", VARIANTS)
def test_beam_search_finds_the_best_pair_of_tokens(variant):
    model, input_ids = small_model(variant).double(), random_tokens(1, 5)
    options = GREEDY | {"max_new_tokens": 2, "num_beams": 61, "length_penalty": 0.0}  # wide enough to be exhaustive
    with torch.no_grad():
        first = model(input_ids).logits[0, -1].log_softmax(-1)
        every = torch.cat([input_ids.expand(61, -1), torch.arange(61)[:, None]], dim=1)
        pairs = first[:, None] + model(every).logits[:, -1].log_softmax(-1)
    best = divmod(pairs.argmax().item(), 61)
    assert tuple(model.generate(input_ids, **options)[0, -2:].tolist()) == best


@pytest.mark.compatibility("Sampling, also with beams")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_follows_the_seed(variant, num_beams):
    model, input_ids = small_model(variant), random_tokens(2, 5)
    options = GREEDY | {"do_sample": True, "top_k": 20, "temperature": 2.0, "num_beams": num_beams}
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(model.generate(input_ids, **options))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])


def test_explicit_static_cache():
    model, input_ids = small_model().double(), random_tokens(2, 12)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        expected = model(input_ids).logits
        first = model(input_ids[:, :9], past_key_values=cache, use_cache=True).logits
        rest = [model(input_ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in (9, 10, 11)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), expected)


@pytest.mark.compatibility("Quantized cache (quanto, 4 bits)")
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantized_cache(variant):
    model, input_ids = small_model(variant, head_dim=16), random_tokens(1, 20)
    options = {"backend": "quanto", "nbits": 4, "residual_length": 8, "q_group_size": 16}
    returned = {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(input_ids, cache_implementation="quantized", cache_config=options, **GREEDY, **returned)
    assert output.sequences.shape == (1, 32)
    with torch.no_grad():
        exact = model(output.sequences).logits[0, 19:-1]
    logits = torch.cat(output.logits)
    # The prompt attends to itself before it is quantized, so the first logits are exact; 4 bits change the later ones.
    torch.testing.assert_close(logits[0], exact[0], atol=1e-4, rtol=1e-4)
    error = (logits[1:] - exact[1:]).square().mean().sqrt() / exact[1:].square().mean().sqrt()
    assert 0 < error < 1  # of other tokens' logits it would be sqrt(2)


@pytest.mark.compatibility("Static cache, compiled step")
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_static_cache_decodes_compiled(variant):
    torch.compiler.reset()
    model, input_ids = small_model(variant, num_hidden_layers=2), random_tokens(1, 7)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        expected = model(input_ids).logits[:, -1]
        model(input_ids[:, :6], past_key_values=cache, use_cache=True)
        logits = step(input_ids[:, 6:], past_key_values=cache, use_cache=True, position_ids=torch.tensor([[6]])).logits
    torch.testing.assert_close(logits[:, -1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.compatibility("Paged `eager` and `sdpa`")
@pytest.mark.compatibility("Paged cache (continuous batching)")
@pytest.mark.parametrize("variant", ["standard", "attnres_block", "projected_full", "sliced_block"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching_equals_greedy(variant, implementation):
    model = small_model(variant, attn_implementation=implementation)
    prompts = [random_tokens(length).tolist() for length in (3, 9, 5)]
    generation = GenerationConfig(**GREEDY)
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
    )
    generated = [output.generated_tokens for output in outputs.values()]
    expected = [model.generate(torch.tensor([p]), **GREEDY)[0, len(p) :].tolist() for p in prompts]
    assert generated == expected


# Depth weights of a generation


def generated_weights(model, input_ids, **options):
    """The tokens, and the depth weights of all of them but the last, which nothing reads: [B, T, S] per site."""
    outputs = model.generate(input_ids, **GREEDY, output_depth_weights=True, return_dict_in_generate=True, **options)
    return outputs.sequences, [torch.cat(site, dim=1) for site in zip(*outputs.depth_weights)]


@pytest.mark.compatibility("Depth weights of each step")
@torch.no_grad()
@pytest.mark.parametrize("variant", ROUTED)
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}], ids=str)
def test_generated_depth_weights_are_those_of_one_forward(variant, options):
    torch.compiler.reset()
    model, input_ids = small_model(variant), random_tokens(1, 4).repeat(1, 2)
    tokens, weights = generated_weights(model, input_ids, **options)
    assert torch.equal(tokens, model.generate(input_ids, **GREEDY))
    expected = model(tokens[:, :-1], output_depth_weights=True).depth_weights
    assert len(weights) == len(expected) == 8
    for ours, theirs in zip(weights, expected):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_generated_depth_weights_come_step_by_step():
    model, input_ids = small_model(), random_tokens(2, 5)
    options = GREEDY | {"output_depth_weights": True}
    outputs = model.generate(input_ids, **options, return_dict_in_generate=True)
    assert [step[0].shape[:2] for step in outputs.depth_weights] == [(2, 5)] + [(2, 1)] * 11
    assert "depth_weights" not in model.generate(input_ids, **GREEDY, return_dict_in_generate=True)
    beams = model.generate(input_ids, **options, return_dict_in_generate=True, num_beams=3)
    assert beams.depth_weights[0][0].shape[:2] == (6, 5)
    with pytest.raises(ValueError, match="needs `return_dict_in_generate=True`"):
        model.generate(input_ids, **options)


@torch.no_grad()
def test_an_assistant_keeps_its_depth_weights_to_itself():
    model, assistant, input_ids = small_model(), small_model("sliced_full", num_hidden_layers=2), random_tokens(1, 5)
    tokens, weights = generated_weights(model, input_ids, assistant_model=assistant)
    assert [site.shape for site in weights] == [
        site.shape for site in model(tokens[:, :-1], output_depth_weights=True).depth_weights
    ]
