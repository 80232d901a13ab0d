"""The page, through its handlers and in a real browser: type, generate, click a token, see another heatmap."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from browser import open_browser
from common import save_text_model

from lr_attnres import cli, explore
from lr_attnres.analysis.explorer import NOTHING, OTHER, PREVIOUS, ExploredModel, Page, Reading, effective_figure
from lr_attnres.analysis.routing import model_names


ROOT = Path(__file__).parents[2]
PROMPT = "The sea\nis"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for variant in ("sliced_block", "projected_full", "standard"):
        save_text_model(folder / variant, variant)
    return folder


@pytest.fixture(scope="module")
def routed(folders):
    return ExploredModel(str(folders / "sliced_block"), "cpu")


# Handlers


@torch.no_grad()
def test_the_stream_equals_generate_and_the_depth_weights_of_one_forward(routed):
    tokens = routed.encode(PROMPT)
    readings = list(routed.stream(tokens, 7))
    assert [len(reading.tokens) for reading in readings] == [11, 12, 13, 14, 15, 16, 17, 17]
    expected = routed.model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=7)[0].tolist()
    assert readings[-1].tokens == expected
    weights = routed.model(torch.tensor([expected]), output_depth_weights=True).depth_weights
    assert len(readings[-1].weights) == 17
    for i, token_weights in enumerate(readings[-1].weights):
        for site, row in enumerate(token_weights):
            torch.testing.assert_close(row[~row.isnan()], weights[site][0, i], atol=1e-4, rtol=1e-4)


def test_stops_at_the_end_of_the_context(routed):
    tokens = routed.encode("x" * 250)
    *_, last = routed.stream(tokens, 100)
    assert len(last.tokens) == len(last.weights) == 256
    assert "The context is full." in Page([routed]).message(last, 250)


def test_an_end_token_in_the_prompt_ends_nothing(routed, monkeypatch):
    """Base models use one token for the end of a text and, before a prompt, its begin."""
    tokens = routed.encode("x")
    first = list(routed.stream(tokens, 1))[-1].tokens[-1]
    monkeypatch.setattr(routed.model.generation_config, "eos_token_id", [tokens[-1]])
    assert len(list(routed.stream(tokens, 2))[0].tokens) < len(list(routed.stream(tokens, 2))[-1].tokens)
    monkeypatch.setattr(routed.model.generation_config, "eos_token_id", first)
    assert list(routed.stream(tokens, 5))[-1].tokens == [*tokens, first]


def test_sampling_varies(routed):
    tokens = routed.encode(PROMPT)
    texts = {tuple(list(routed.stream(tokens, 8, temperature=1.5))[-1].tokens) for _ in range(4)}
    assert len(texts) > 1


def test_shows_the_mean_over_depth_heads_or_one_of_them(routed, tmp_path):
    save_text_model(tmp_path / "heads", "sliced_block_heads")
    page = Page([ExploredModel(str(tmp_path / "heads"), "cpu"), routed])
    *_, reading = page.writer.stream(page.writer.encode(PROMPT), 3)
    weights = reading.weights[4]
    assert weights.shape == (8, 4, 4)  # sites, heads, sources
    mean, other = page.views(reading, [4], OTHER)
    assert torch.equal(mean.mean_weights.nan_to_num(), weights.mean(1).nan_to_num())
    assert mean.title.endswith(", mean over heads") and other.title.endswith("sliced-n3-r8")
    heads = [page.views(reading, [4], NOTHING, head)[0] for head in (1, 2, 3, 4)]
    assert torch.equal(heads[2].mean_weights.nan_to_num(), weights[:, 2].nan_to_num())
    assert heads[2].title.endswith(", head 3")
    means = [sum(values) / 4 for values in zip(*(head.effective for head in heads))]
    assert mean.effective == pytest.approx(means)
    other = page.views(reading, [4], OTHER, head=2)[1]  # has no heads
    assert other.weights.shape == (8, 4) and "head" not in other.title
    assert page.look(reading, [4], OTHER, 2)[0] is not None


def test_compares_two_tokens_or_two_checkpoints(routed, folders):
    page = Page([routed, ExploredModel(str(folders / "projected_full"), "cpu")])
    *_, reading = routed.stream(routed.encode(PROMPT), 3)
    (alone,) = page.views(reading, [4, 2], NOTHING)
    assert alone.weights is reading.weights[4]
    first, second = page.views(reading, [4, 2], PREVIOUS)
    assert second.weights is reading.weights[2] and first.title.startswith("A: token 4 's', sliced-n3")
    first, second = page.views(reading, [4, 2], OTHER)
    assert second.title.startswith("B: token 4 's', projected-full")
    assert second.weights.shape == (8, 9) and not torch.equal(first.weights, second.weights[:, :4])
    lines = effective_figure([first, second]).axes[0].get_lines()
    assert lines[1].get_ydata() == pytest.approx(first.effective) and max(second.effective) <= 9


def test_two_checkpoints_of_one_variant_have_different_names(folders, tmp_path):
    shutil.copytree(folders / "sliced_block", tmp_path / "step-2")
    served = explore([str(folders / "sliced_block"), str(tmp_path / "step-2")], wait=False, device="cpu")
    try:
        with urllib.request.urlopen(f"{served.local_url}config", timeout=30) as answer:
            page = answer.read().decode()
        assert "sliced-n3-r8 (sliced_block) and sliced-n3-r8 (step-2); 4 layers" in page
        assert '"the other checkpoint, sliced-n3-r8 (step-2)"' in page
    finally:
        served.close()


def test_figures_name_two_checkpoints_of_one_variant(folders, tmp_path):
    paths = [str(folders / "sliced_block"), str(tmp_path / "a-model-with-a-long-name")]
    shutil.copytree(*paths)
    models = [ExploredModel(path, "cpu", name=name) for path, name in zip(paths, model_names(paths))]
    *_, reading = models[0].stream(models[0].encode(PROMPT), 1)
    heatmaps, effective, caption = Page(models).look(reading, [4], OTHER)
    titles = [axes.get_title() for axes in heatmaps.axes if axes.get_title()]
    legend = [text.get_text() for text in effective.axes[0].get_legend().get_texts()]
    for texts in (titles, legend, caption.split("\n")):
        assert "(sliced_block)" in texts[0] and "(a-model-with-a-long-name)" in texts[1]
    assert max(len(line) for title in titles for line in title.split("\n")) <= 44 < len(legend[1])


@pytest.mark.parametrize("picked", [[], [0], [99]])
def test_a_token_that_has_not_been_read_shows_nothing(picked, routed):
    assert Page([routed]).look(Reading(), picked, PREVIOUS) == (None, None, "")


@pytest.mark.parametrize("sources", [["a", "b", "c"], []])
def test_refuses_any_other_number_of_models(sources):
    with pytest.raises(ValueError, match="explore one, or two to compare"):
        explore(sources)


def test_refuses_models_that_read_different_tokens(routed, folders, tmp_path):
    shutil.copytree(folders / "projected_full", tmp_path / "other")
    path = tmp_path / "other/tokenizer.json"
    path.write_text(path.read_text().replace("<|end|>", "<|stop|>"))
    config = tmp_path / "other/tokenizer_config.json"
    config.write_text(config.read_text().replace("<|end|>", "<|stop|>"))
    with pytest.raises(ValueError, match="different tokenizers"):
        Page([routed, ExploredModel(str(tmp_path / "other"), "cpu")])


def test_command_refuses_a_folder_that_is_none(tmp_path, capsys):
    assert cli.main(["explore", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("Error: ")


# The browser


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


class Tab:
    """A browser tab with the page; `foreign` has every request to another host."""

    def __init__(self, browser, url: str):
        self.page, self.foreign = browser.new_page(viewport={"width": 1200, "height": 1400}), []
        self.page.on("request", lambda request: None if request.url.startswith(url) else self.foreign.append(request))
        self.page.goto(url)

    def generate(self, prompt: str) -> None:
        self.page.locator("#prompt textarea").fill(prompt)
        self.page.locator("#generate").click()

    def expect(self, place: str, text: str) -> None:
        self.page.locator(place, has_text=re.compile(text)).wait_for(timeout=30_000)

    def heatmap(self) -> str:
        image = self.page.locator("#weights img")
        image.wait_for(timeout=30_000)
        return image.get_attribute("src")

    def other_heatmap(self, before: str) -> str:
        end = time.monotonic() + 30
        while (now := self.heatmap()) == before:
            assert time.monotonic() < end, "the heatmap did not change"
            self.page.wait_for_timeout(100)
        return now

    def click_token(self, index: int) -> None:
        self.page.locator("#tokens .token").nth(index).click()


def test_type_generate_click_compare(browser, folders):
    served = explore([str(folders / "sliced_block"), str(folders / "projected_full")], wait=False, device="cpu")
    try:
        tab = Tab(browser, served.local_url)
        tab.expect("#status", "Type a prompt")
        tab.generate("   ")
        tab.expect("#status", "The prompt is empty: type something")
        tab.generate("x" * 300)
        tab.expect("#status", r"The prompt has 300 tokens, but the context of this model is 256: shorten it\.")
        assert tab.page.locator("#weights img").count() == 0

        tab.generate(PROMPT)
        tab.expect("#status", "10 tokens of the prompt, 32 generated")
        tab.expect("#caption", "token 9 's'")
        assert tab.page.locator("#tokens .token").count() == 42
        first = tab.heatmap()
        tab.click_token(4)
        tab.expect("#caption", "A: token 4 's'")
        second = tab.other_heatmap(first)
        tab.page.get_by_label("the token clicked before").check()
        tab.expect("#caption", "B: token 9 's', sliced-n3")
        third = tab.other_heatmap(second)
        tab.page.get_by_label("the other checkpoint").check()
        tab.expect("#caption", "B: token 4 's', projected-full")
        tab.other_heatmap(third)
        assert tab.page.locator("#effective img").count() == 1
        assert tab.foreign == []
    finally:
        served.close()


def test_tokens_appear_one_by_one(browser, folders, monkeypatch):
    served = explore([str(folders / "sliced_block")], wait=False, device="cpu")
    stream = ExploredModel.stream

    def slow(*arguments):
        for reading in stream(*arguments):
            time.sleep(0.1)  # slow enough for the browser to draw each token
            yield reading

    monkeypatch.setattr(ExploredModel, "stream", slow)
    try:
        tab = Tab(browser, served.local_url)
        tab.generate(PROMPT)
        seen = set()
        while max(seen, default=0) < 42:
            seen.add(tab.page.locator("#tokens .token").count())
        assert len(seen) > 5
    finally:
        served.close()


def test_a_model_without_routing(browser, folders):
    served = explore([str(folders / "standard")], wait=False, device="cpu")
    try:
        tab = Tab(browser, served.local_url)
        tab.expect("#status", "standard has the ordinary residual sum.*no depth routing to show")
        tab.generate(PROMPT)
        tab.expect("#status", "no depth routing to show.*32 generated")
        tab.click_token(3)
        tab.page.wait_for_timeout(1000)
        assert tab.page.locator("#weights img").count() == 0
    finally:
        served.close()


# The Space


def test_the_space_runs_from_its_own_files(folders, tmp_path):
    """With the package beside it, as its README says; the variable MODELS names a model."""
    shutil.copytree(ROOT / "examples/space", tmp_path / "space")
    shutil.copytree(ROOT / "lr_attnres", tmp_path / "space/lr_attnres")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment |= {"MODELS": str(folders / "sliced_block"), "GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "app.py"]
    with subprocess.Popen(command, cwd=tmp_path / "space", env=environment, stderr=subprocess.PIPE) as process:
        try:
            for _ in range(900):  # imports are slow on a busy machine
                assert process.poll() is None, process.stderr.read().decode()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=5) as answer:
                        assert b"Where does each site read?" in answer.read()
                    break
                except OSError:
                    time.sleep(0.2)
            else:
                pytest.fail("the Space did not answer")
        finally:
            process.terminate()


def test_the_space_asks_for_what_is_tested():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wanted = (ROOT / "examples/space/requirements.txt").read_text().split()
    assert wanted and all(f"{name}=={pins[name]}" in wanted for name in (line.split("==")[0] for line in wanted))
    front = (ROOT / "examples/space/README.md").read_text().split("---")[1]
    assert f"sdk_version: {pins['gradio']}\n" in front and "app_file: app.py\n" in front and "sdk: gradio\n" in front


def test_the_space_says_what_is_missing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MODELS"}
    result = subprocess.run([sys.executable, ROOT / "examples/space/app.py"], env=environment, capture_output=True)
    assert result.returncode == 1 and b"Set the variable MODELS" in result.stderr
