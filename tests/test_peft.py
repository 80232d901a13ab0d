"""Adapters: LoRA on every linear layer, prompt tuning, and queries trained beside an adapter."""

import pytest
import torch
from common import ROUTED, VARIANTS, random_tokens, small_model
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model


def train_a_little(model: torch.nn.Module, input_ids: torch.Tensor, steps: int = 5) -> tuple[float, float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.compatibility("PEFT: LoRA on every linear layer, saved, loaded, merged")
@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_on_all_linears(variant, tmp_path):
    base, input_ids = small_model(variant), random_tokens(2, 9)
    before = base(input_ids).logits
    model = get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear"))
    torch.testing.assert_close(model(input_ids=input_ids).logits, before)
    first, last = train_a_little(model, input_ids)
    assert last < first
    trained = model.eval()(input_ids=input_ids).logits
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    reloaded = PeftModel.from_pretrained(small_model(variant), tmp_path).eval()
    torch.testing.assert_close(reloaded(input_ids=input_ids).logits, trained)
    merged = reloaded.merge_and_unload()
    torch.testing.assert_close(merged(input_ids).logits, trained, atol=1e-4, rtol=1e-4)


def test_lora_needs_target_modules():
    """As docs/training.md says. Where PEFT gets defaults for our model type, the page can drop it."""
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(small_model(), LoraConfig(task_type=TaskType.CAUSAL_LM))
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "v_proj"])
    trained = [name for name, p in get_peft_model(small_model(), config).named_parameters() if p.requires_grad]
    assert len(trained) == 4 * 2 * 2  # layers, projections, two factors


@pytest.mark.compatibility("PEFT: queries beside LoRA")
@pytest.mark.parametrize("variant", ROUTED)
def test_queries_train_and_save_beside_an_adapter(variant, tmp_path):
    input_ids = random_tokens(2, 9)
    torch.manual_seed(0)
    model = get_peft_model(
        small_model(variant),
        LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules="all-linear", modules_to_save=["depth_queries"]),
    )
    queries = model.base_model.model.model.depth_queries
    before = queries.modules_to_save["default"].weight.detach().clone()
    train_a_little(model, input_ids)
    assert not torch.equal(queries.modules_to_save["default"].weight, before)
    trained = model.eval()(input_ids=input_ids).logits
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    reloaded = PeftModel.from_pretrained(small_model(variant), tmp_path).eval()
    torch.testing.assert_close(reloaded(input_ids=input_ids).logits, trained)


@pytest.mark.compatibility("PEFT: prompt tuning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_tuning(variant):
    input_ids = random_tokens(2, 9)
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    model = get_peft_model(small_model(variant), config)
    first, last = train_a_little(model, input_ids)
    assert last < first
    tokens = model.eval().generate(input_ids=input_ids, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits  # those of the prompt's own tokens come first
    assert torch.equal(tokens[:, 9:], logits[:, -4:-1].argmax(-1))
