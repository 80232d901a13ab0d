"""A local web page that shows routing: generate text, click a token, see which sources every site read for it.

Shape letters: T tokens, M sites, H depth heads, S sources of the largest site.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import gradio as gr
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import nn

from ..data.tokenizers import load_tokenizer
from ..depth_routing import depth_block_ends
from ..folders.loading import load_config, load_language_model
from ..inference.server import check_address
from ..variants import variant_name
from .plots import COLOURS, STYLE, clip_level, heatmap, one_panel, panel_grid
from .routing import effective_sources, model_names


FIRST, SECOND = "A", "B"
TOKEN_COLOURS = {FIRST: "#0072B2", SECOND: "#E69F00"}
CSS = "#tokens .text { border-bottom: 2px solid var(--border-color-primary); margin-right: 2px; }"  # separates tokens
NOTHING, PREVIOUS, OTHER = "nothing", "the token clicked before", "the other checkpoint"
NO_ROUTING = (
    "**{name}** has the ordinary residual sum (`residual_type` is `standard`): there is no depth routing to show. "
    "It still generates text; open a model of another `residual_type` to see routing."
)
LabelledTokens = list[tuple[str, str | None]]  # text of each token, and A or B if it is compared


@dataclass
class Reading:
    """The tokens, and the depth weights of each token that the model has read, [M, S], or [M, H, S] with several depth
    heads; NaN where a site has no such source. The newest token of a stream has not been read yet."""

    tokens: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class ExploredModel:
    """A model with its tokenizer and the name that the page shows."""

    def __init__(
        self,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        name: str | None = None,
        depth_backend: str = "torch",
    ):
        self.config = load_config(model)
        self.name = name or variant_name(self.config)
        self.tokenizer = load_tokenizer(model, self.config.vocab_size)
        self.model = load_language_model(model, device, dtype, depth_backend=depth_backend).eval()
        self.is_routed = self.config.residual_type != "standard"
        self.num_heads = self.config.depth_heads if self.is_routed else 1
        self.block_ends = depth_block_ends(2 * self.config.num_hidden_layers, self.config.num_depth_blocks)

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt. The page shows the message of a ValueError."""
        if not prompt.strip():
            raise ValueError("The prompt is empty: type something for the model to continue.")
        tokens = self.tokenizer(prompt, verbose=False)["input_ids"]
        context = self.config.max_position_embeddings
        if len(tokens) >= context:
            raise ValueError(
                f"The prompt has {len(tokens):,} tokens, but the context of this model is {context:,}: shorten it."
            )
        return tokens

    @torch.inference_mode()
    def stream(self, tokens: list[int], max_new_tokens: int, temperature: float = 0.0) -> Iterator[Reading]:
        """Read the tokens, then generate and read one token at a time; greedy at temperature 0."""
        weights: list[torch.Tensor] = []
        cache, new, num_prompt = None, tokens, len(tokens)
        end = self.model.generation_config.eos_token_id
        ends = [[token] for token in ([end] if isinstance(end, int) else end or [])]
        max_tokens = min(len(tokens) + max_new_tokens, self.config.max_position_embeddings)
        while True:
            input_ids = torch.tensor([new], device=self.model.device)
            outputs = self.model(
                input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1, output_depth_weights=True
            )
            weights = weights + self._weights(outputs.depth_weights)
            if len(tokens) >= max_tokens or tokens[num_prompt:][-1:] in ends:
                yield Reading(tokens, weights)
                return
            logits = outputs.logits[0, -1].float()
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else logits.argmax()
            cache, new = outputs.past_key_values, [int(chosen)]
            tokens = tokens + new
            yield Reading(tokens, weights)

    def pieces(self, tokens: list[int]) -> list[str]:
        """The text of each token, with visible line ends."""
        return [str(self.tokenizer.decode([token])).replace("\n", "⏎") for token in tokens]

    def _weights(self, depth_weights: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """M tensors [1, T, sources of the site] -> T tensors [M, S]; with H before the sources, if there are heads."""
        if not self.is_routed:
            return []
        num_sources = max(weights.shape[-1] for weights in depth_weights)
        sites = [nn.functional.pad(w[0], (0, num_sources - w.shape[-1]), value=float("nan")) for w in depth_weights]
        return list(torch.stack(sites, dim=1).cpu())


@dataclass
class View:
    """One side of the comparison: the weights of a token in a model, [M, S], or [M, H, S] of all its heads."""

    title: str
    model: ExploredModel
    weights: torch.Tensor

    @property
    def mean_weights(self) -> torch.Tensor:
        """[M, S], the mean over heads."""
        return self.weights if self.weights.dim() == 2 else self.weights.mean(1)

    @property
    def effective(self) -> list[float]:
        """Of each site, the mean over heads."""
        return effective_sources(self.weights.nan_to_num(0.0)).view(len(self.weights), -1).mean(1).tolist()


def heatmap_figure(views: list[View]) -> Figure:
    """Heatmaps (sites x sources), side by side on one colour scale."""
    top = max(clip_level(view.mean_weights) for view in views)
    figure, panels = panel_grid(len(views), height=4.4)
    for axes, view in zip(panels, views):
        title = textwrap.fill(view.title, 44, break_on_hyphens=False)  # as wide as a panel: names of folders are long
        heatmap(axes, view.mean_weights, view.model.block_ends, title, "depth weight", top)
    return figure


def effective_figure(views: list[View]) -> Figure:
    """The effective and, in grey, the available sources of each site."""
    figure, axes = one_panel("", "site", "effective sources", (7.5, 3.2))
    for view, line in zip(views, ("-", "--")):
        sites = range(1, len(view.weights) + 1)
        axes.plot(sites, (~view.mean_weights.isnan()).sum(-1).tolist(), line, color="0.65", linewidth=1, zorder=1)
        colour = COLOURS[view.model.config.residual_type]
        axes.plot(sites, view.effective, line, color=colour, marker="o", markersize=4, label=view.title)
    axes.plot([], [], color="0.65", linewidth=1, label="available sources")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


class Page:
    """The event handlers. The first model generates; an optional second model reads the same tokens."""

    def __init__(self, models: list[ExploredModel]):
        self.models = models
        self.writer = models[0]
        if len(models) == 2 and models[0].tokenizer.get_vocab() != models[1].tokenizer.get_vocab():
            raise ValueError("the two models have different tokenizers: explore them one by one.")

    def generate(
        self, prompt: str, max_new_tokens: float, temperature: float
    ) -> Iterator[tuple[LabelledTokens, Reading, list[int], str]]:
        """Yields (tokens, reading, picked tokens, message) after each new token."""
        try:
            tokens = self.writer.encode(prompt)
        except ValueError as error:
            yield [], Reading(), [], f"⚠️ {error}"
            return
        for reading in self.writer.stream(tokens, int(max_new_tokens), temperature):
            picked = [len(tokens) - 1] if reading.weights else []
            yield self.mark(reading, picked, NOTHING), reading, picked, self.message(reading, len(tokens))

    def message(self, reading: Reading, num_prompt: int) -> str:
        counts = f"{num_prompt} tokens of the prompt, {len(reading.tokens) - num_prompt} generated."
        if not self.writer.is_routed:
            return f"⚠️ {NO_ROUTING.format(name=self.writer.name)} {counts}"
        if len(reading.tokens) == self.writer.config.max_position_embeddings:
            counts += " The context is full."
        return f"{counts} Click a token to see which sources the sites read for it."

    def pick(
        self, reading: Reading, picked: list[int], compare: str, event: gr.SelectData
    ) -> tuple[list[int], LabelledTokens]:
        """Handle a click: the clicked token becomes the first picked one, the previous one the second."""
        index = event.index[0] if isinstance(event.index, (list, tuple)) else event.index
        picked = [index, *(other for other in picked if other != index)][:2]
        return picked, self.mark(reading, picked, compare)

    def mark(self, reading: Reading, picked: list[int], compare: str) -> LabelledTokens:
        """The tokens, labelled if they are shown in the figures."""
        labels = dict(zip(picked, (FIRST, SECOND) if compare == PREVIOUS else (FIRST,)))
        return [(piece, labels.get(i)) for i, piece in enumerate(self.writer.pieces(reading.tokens))]

    def look(
        self, reading: Reading, picked: list[int], compare: str, head: int = 0
    ) -> tuple[Figure | None, Figure | None, str]:
        """Returns (heatmaps, effective sources, caption) of the picked tokens, of one depth head or (0) of all."""
        views = self.views(reading, picked, compare, head)
        if not views:
            return None, None, ""
        lines = [
            f"**{view.title}** reads {sum(view.effective) / len(view.effective):.2f} sources on average over sites, "
            f"{view.effective[-1]:.2f} at the last."
            for view in views
        ]
        with rc_context(STYLE):
            return heatmap_figure(views), effective_figure(views), "  \n".join(lines)

    def views(self, reading: Reading, picked: list[int], compare: str, head: int = 0) -> list[View]:
        if not picked or picked[0] >= len(reading.weights):
            return []
        views = [self.view(FIRST, self.writer, reading, picked[0], head)]
        if compare == PREVIOUS and len(picked) == 2:
            views.append(self.view(SECOND, self.writer, reading, picked[1], head))
        if compare == OTHER and len(self.models) == 2 and self.models[1].is_routed:
            other = next(self.models[1].stream(reading.tokens, max_new_tokens=0))
            views.append(self.view(SECOND, self.models[1], other, picked[0], head))
        return views

    def view(self, label: str, model: ExploredModel, reading: Reading, index: int, head: int) -> View:
        """A model that has no such head shows the mean over its heads."""
        title = f"{label}: token {index} {self.writer.pieces([reading.tokens[index]])[0]!r}"
        if len(self.models) == 2:
            title += f", {model.name}"
        weights = reading.weights[index]
        if weights.dim() == 3 and 1 <= head <= weights.shape[1]:
            return View(f"{title}, head {head}", model, weights[:, head - 1])
        return View(f"{title}, mean over heads" if weights.dim() == 3 else title, model, weights)


def build_page(models: list[ExploredModel]) -> gr.Blocks:
    """The layout, connected to the handlers of a `Page`."""
    page = Page(models)
    title = " and ".join(model.name for model in models)
    choices = [(text, text) for text in (NOTHING, PREVIOUS)] + [(f"{OTHER}, {m.name}", OTHER) for m in models[1:]]
    start = "Type a prompt and press Generate."
    if not page.writer.is_routed:
        start = "⚠️ " + NO_ROUTING.format(name=page.writer.name)
    # No analytics, and system fonts (see `explore`): the page sends no request to another host.
    with gr.Blocks(title=f"Depth routing: {title}", analytics_enabled=False) as blocks:
        gr.Markdown(f"# Where does each site read?\n{title}; {page.writer.config.num_hidden_layers} layers")
        with gr.Row():
            prompt = gr.Textbox(label="Prompt", lines=3, scale=3, elem_id="prompt")
            with gr.Column(scale=1):
                max_new_tokens = gr.Slider(1, 256, value=32, step=1, label="New tokens", elem_id="new_tokens")
                temperature = gr.Slider(0, 2, value=0, step=0.1, label="Temperature (0: greedy)")
                button = gr.Button("Generate", variant="primary", elem_id="generate")
        status = gr.Markdown(start, elem_id="status")
        tokens = gr.HighlightedText(
            label="Tokens", color_map=TOKEN_COLOURS, show_inline_category=False, elem_id="tokens", interactive=False
        )
        compare = gr.Radio(choices, value=NOTHING, label="Compare with", elem_id="compare")
        num_heads = max(model.num_heads for model in models)
        heads = [("mean over heads", 0), *((str(head), head) for head in range(1, num_heads + 1))]
        head = gr.Radio(heads, value=0, label="Depth head", elem_id="head", visible=num_heads > 1)
        caption = gr.Markdown(elem_id="caption")
        weights = gr.Plot(show_label=False, elem_id="weights")
        effective = gr.Plot(show_label=False, elem_id="effective")
        reading, picked = gr.State(Reading()), gr.State([])

        redraw = {
            "fn": page.look,
            "inputs": [reading, picked, compare, head],
            "outputs": [weights, effective, caption],
        }
        for begin in (button.click, prompt.submit):
            generated = begin(page.generate, [prompt, max_new_tokens, temperature], [tokens, reading, picked, status])
            generated.then(**redraw)
        tokens.select(page.pick, [reading, picked, compare], [picked, tokens]).then(**redraw)
        compare.change(page.mark, [reading, picked, compare], tokens).then(**redraw)
        head.change(**redraw)
    return blocks


def explore(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    depth_backend: str = "torch",
    wait: bool = True,
) -> gr.Blocks:
    """Serve the page for one model, or two to compare, until interrupted. With `wait=False`, return at once: the page
    is served until the returned object is closed."""
    if not 1 <= len(models) <= 2:
        raise ValueError(f"`models` has {len(models)} models; explore one, or two to compare.")
    check_address(host, port)
    explored = [
        ExploredModel(model, device, dtype, name, depth_backend) for model, name in zip(models, model_names(models))
    ]
    blocks = build_page(explored)
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    blocks.queue().launch(
        server_name=host,
        server_port=port,
        theme=gr.themes.Default(**fonts),
        css=CSS,
        footer_links=[],
        ssr_mode=False,
        quiet=not wait,
        prevent_thread_lock=not wait,
        state_session_capacity=100,
    )
    return blocks
