"""`generate` streams the greedy text of the model, or samples with a seed."""

import io
from contextlib import redirect_stdout

import pytest
from common import ONE_OF_EACH, byte_tokenizer, perturb, save_text_model, small_model
from transformers import LlamaConfig, LlamaForCausalLM

from lr_attnres import cli, generate_text


PROMPT = "The sea is"


@pytest.fixture
def model(tmp_path):
    return save_text_model(tmp_path)


class Recorder(io.StringIO):
    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


@pytest.mark.compatibility("Streamed text (`lr-attnres generate`)")
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_greedy_text_in_pieces(variant, tmp_path):
    model, tokenizer, output = save_text_model(tmp_path, variant), byte_tokenizer(), Recorder()
    with redirect_stdout(output):
        text = generate_text(str(tmp_path), PROMPT, max_new_tokens=24, device="cpu")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = tokenizer.decode(
        model.generate(**inputs, do_sample=False, max_new_tokens=24)[0], skip_special_tokens=True
    )
    assert text == expected and text.startswith(PROMPT)
    assert output.getvalue() == expected + "\n"
    assert len([piece for piece in output.writes if piece]) > 1


def test_an_ordinary_model(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    llama = perturb(LlamaForCausalLM(config)).eval()
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    expected = llama.generate(**inputs, do_sample=False, max_new_tokens=8)[0]
    text = generate_text(str(tmp_path), PROMPT, max_new_tokens=8, device="cpu")
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


def test_sampling_is_repeatable(model, tmp_path):
    def sample(seed):
        return generate_text(str(tmp_path), PROMPT, max_new_tokens=16, temperature=1.5, seed=seed, device="cpu")

    assert sample(1) == sample(1) != sample(2)


def test_samples_from_all_tokens(model, tmp_path, monkeypatch):
    """Transformers' default would keep the 50 likeliest."""
    seen = {}
    generate = type(model).generate
    monkeypatch.setattr(
        type(model), "generate", lambda self, *args, **kw: seen.update(kw) or generate(self, *args, **kw)
    )
    generate_text(str(tmp_path), PROMPT, max_new_tokens=1, temperature=1.0, device="cpu")
    assert seen["do_sample"] and seen["top_k"] == 0


def test_command(model, tmp_path, capsys):
    arguments = ["generate", str(tmp_path), "--prompt", PROMPT, "--max-new-tokens", "4", "--device", "cpu"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith(PROMPT)
    assert cli.main(["generate", str(tmp_path), "--prompt", ""]) == 1
    assert capsys.readouterr().err == "Error: `prompt` is empty: give the model some text to continue.\n"
    assert cli.main([*arguments, "--device", "abacus"]) == 1
    assert "Error: `device` abacus cannot be used: " in capsys.readouterr().err
    not_utf8 = "caf\udce9"  # how Python decodes an argument with a byte that is not UTF-8
    assert cli.main(["generate", str(tmp_path), "--prompt", not_utf8]) == 1
    assert "Error: `prompt` is 'caf\\udce9', which is not Unicode text." in capsys.readouterr().err
    assert cli.main([*arguments, "--temperature", "1e-40"]) == 1
    assert "Error: `temperature` is 1e-40; it must be 0" in capsys.readouterr().err
    assert cli.main([*arguments, "--temperature", "-1"]) == 1
    assert "Error: `temperature` is -1.0; it must be 0" in capsys.readouterr().err
    assert cli.main([*arguments, "--temperature", "nan"]) == 1
    assert "Error: `temperature` is nan" in capsys.readouterr().err
    assert cli.main([*arguments, "--temperature", "1", "--top-p", "2"]) == 1
    assert "Error: `top_p` is 2.0; it must be above 0 and at most 1." in capsys.readouterr().err
    assert cli.main([*arguments, "--top-p", "0.9"]) == 1
    assert "Error: `top_p` is 0.9, but `temperature` is 0, which is greedy" in capsys.readouterr().err
    assert cli.main([*arguments, "--max-new-tokens", "-1"]) == 1
    assert capsys.readouterr().err == "Error: `max_new_tokens` is -1; it must be at least 1.\n"
    assert cli.main([*arguments, "--seed", "-1"]) == 1
    assert capsys.readouterr().err == "Error: `seed` is -1; it must lie in 0..4294967295.\n"


def test_damaged_weights(model, tmp_path, capsys):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert cli.main(["generate", str(tmp_path), "--prompt", PROMPT]) == 1
    assert f"Error: {weights} cannot be read" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_a_tokenizer(tmp_path, capsys):
    small_model().save_pretrained(tmp_path)
    assert cli.main(["generate", str(tmp_path), "--prompt", PROMPT]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("Error: ") and "tokenizer" in error


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_weights_that_overflow(temperature, model, tmp_path, capsys):
    model.model.layers[0].mlp.down_proj.weight.data[:] = 3e38
    model.save_pretrained(tmp_path)
    assert cli.main(["generate", str(tmp_path), "--prompt", PROMPT, "--temperature", temperature]) == 1
    assert "Error: the logits are NaN" in capsys.readouterr().err.splitlines()[-1]


def test_the_context_bounds_prompt_and_text(model, tmp_path, capsys):
    """Also for a billion tokens, which end with the context of 256."""
    assert cli.main(["generate", str(tmp_path), "--prompt", "x" * 256]) == 1
    shown = capsys.readouterr()
    assert shown.err == "Error: `prompt` has 256 tokens, but the context of this model is 256: shorten it.\n"
    arguments = ["generate", str(tmp_path), "--prompt", "x" * 240, "--device", "cpu", "--max-new-tokens"]
    assert cli.main([*arguments, str(10**9)]) == 0
    shown = capsys.readouterr()
    note = (
        "Note: the context of this model is 256 tokens, the prompt has 240: at most 16 new tokens, not 1,000,000,000."
    )
    assert note in shown.err.splitlines()
    assert cli.main([*arguments, "16"]) == 0
    again = capsys.readouterr()
    assert again.out == shown.out and "Note:" not in again.err
