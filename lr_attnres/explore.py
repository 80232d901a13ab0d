"""A web page to look at routing: generate text, click a token, see where every site read for it.

Shape letters: T tokens, M sites, S sources of the largest site.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import gradio as gr
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .analysis import effective_sources
from .depth_routing import depth_block_ends
from .loading import load_config, load_language_model, load_tokenizer
from .plots import COLOURS, STYLE, clip_level, heatmap
from .serving import check_address
from .variants import variant_name


FONTS = ["system-ui", "sans-serif"]
MONO_FONTS = ["ui-monospace", "monospace"]
FIRST, SECOND = "A", "B"
TOKEN_COLOURS = {FIRST: "#0072B2", SECOND: "#E69F00"}
CSS = "#tokens .text { border-bottom: 2px solid var(--border-color-primary); margin-right: 2px; }"  # where tokens end
NOTHING, PREVIOUS, OTHER = "nothing", "the token clicked before", "the other checkpoint"
NO_ROUTING = (
    "**{name}** has the ordinary residual sum (`residual_type` is `standard`): there is no depth routing to show. "
    "It still generates text; open an `attnres`, `projected` or `sliced` model to see routing."
)
Marked = list[tuple[str, str | None]]  # tokens, those that are compared with their label


@dataclass
class Reading:
    """Tokens so far, and the depth weights [M, S] of those that have been read; NaN where a site has no source."""

    tokens: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class ExploredModel:
    """A model with its tokenizer, and what the page says of it."""

    def __init__(self, model: str, device: str = "auto", dtype: str = "auto"):
        self.config = load_config(model)
        self.name = variant_name(self.config)
        self.tokenizer = load_tokenizer(model, self.config)
        self.model = load_language_model(model, device, dtype).eval()
        self.is_routed = self.config.residual_type != "standard"
        self.block_ends = depth_block_ends(2 * self.config.num_hidden_layers, self.config.num_depth_blocks)

    def encode(self, prompt: str) -> list[int]:
        """Raises ValueError, in words for the page, for a prompt that the model cannot read."""
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
        """Read the prompt, then choose and read one token after the other; greedy at temperature 0."""
        reading, cache, new = Reading(tokens), None, tokens
        end = self.model.generation_config.eos_token_id
        ends = [end] if isinstance(end, int) else end or []
        last = min(len(tokens) + max_new_tokens, self.config.max_position_embeddings)
        while True:
            input_ids = torch.tensor([new], device=self.model.device)
            outputs = self.model(
                input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1, output_depth_weights=True
            )
            reading = Reading(reading.tokens, reading.weights + self._weights(outputs.depth_weights, len(new)))
            if len(reading.tokens) >= last or reading.tokens[-1] in ends:
                yield reading
                return
            cache, new = outputs.past_key_values, [self._choose(outputs.logits[0, -1], temperature)]
            reading = Reading(reading.tokens + new, reading.weights)
            yield reading

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Reading:
        """The depth weights of a text that is there already."""
        outputs = self.model(torch.tensor([tokens], device=self.model.device), output_depth_weights=True)
        return Reading(tokens, self._weights(outputs.depth_weights, len(tokens)))

    def pieces(self, tokens: list[int]) -> list[str]:
        """One text per token, with line ends made visible."""
        return [str(self.tokenizer.decode([token])).replace("\n", "⏎") for token in tokens]

    def _choose(self, logits: torch.Tensor, temperature: float) -> int:
        if temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial((logits.float() / temperature).softmax(-1), 1))

    def _weights(self, depth_weights: tuple[torch.Tensor, ...], num_tokens: int) -> list[torch.Tensor]:
        """M tensors [1, T, S of the site] -> T tensors [M, S]."""
        if not self.is_routed:
            return []
        most = max(weights.shape[-1] for weights in depth_weights)
        rows = [
            torch.nn.functional.pad(weights[0].cpu(), (0, most - weights.shape[-1]), value=float("nan"))
            for weights in depth_weights
        ]
        return list(torch.stack(rows, dim=1))


@dataclass
class View:
    """One side of the comparison: the weights [M, S] of a token in a model."""

    title: str
    model: ExploredModel
    weights: torch.Tensor

    @property
    def effective(self) -> list[float]:
        return [effective_sources(row[~row.isnan()]).item() for row in self.weights]


def heatmap_figure(views: list[View]) -> Figure:
    """Sites x sources, side by side on one scale."""
    top = max(clip_level(view.weights) for view in views)
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(views), 4.6), layout="constrained")
        for axes, view in zip(figure.subplots(1, len(views), squeeze=False)[0], views):
            heatmap(axes, view.weights, view.model.block_ends, view.title, "depth weight", top)
        return figure


def effective_figure(views: list[View]) -> Figure:
    """How many sources each site reads for the token, and how many it could."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for view, line in zip(views, ("-", "--")):
            sites = range(1, len(view.weights) + 1)
            axes.plot(sites, (~view.weights.isnan()).sum(-1).tolist(), color="0.65", linewidth=1, zorder=1)
            colour = COLOURS[view.model.config.residual_type]
            axes.plot(sites, view.effective, line, color=colour, marker="o", markersize=4, label=view.title)
        axes.plot([], [], color="0.65", linewidth=1, label="sources there are")
        axes.set(xlabel="site", ylabel="effective sources", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        return figure


class Page:
    """The page's handlers. The first model writes; the second, if there is one, reads the same tokens."""

    def __init__(self, models: list[ExploredModel]):
        self.models = models
        self.writer = models[0]
        if len(models) == 2 and models[0].tokenizer.get_vocab() != models[1].tokenizer.get_vocab():
            raise ValueError("the two models have different tokenizers, so they cannot read the same tokens.")

    def generate(
        self, prompt: str, max_new_tokens: float, temperature: float
    ) -> Iterator[tuple[Marked, Reading, list[int], str]]:
        """-> tokens, reading, picked tokens, message; token by token."""
        try:
            tokens = self.writer.encode(prompt)
        except ValueError as error:
            yield [], Reading(), [], f"⚠️ {error}"
            return
        for reading in self.writer.stream(tokens, int(max_new_tokens), temperature):
            picked = [len(tokens) - 1] if reading.weights else []
            yield self.show_tokens(reading, picked), reading, picked, self.message(reading, len(tokens))

    def message(self, reading: Reading, num_prompt: int) -> str:
        count = f"{num_prompt} tokens of the prompt, {len(reading.tokens) - num_prompt} generated."
        if not self.writer.is_routed:
            return f"⚠️ {NO_ROUTING.format(name=self.writer.name)} {count}"
        full = len(reading.tokens) == self.writer.config.max_position_embeddings
        return f"{count} {'The context is full. ' if full else ''}Click a token to see where the sites read for it."

    def show_tokens(self, reading: Reading, picked: list[int]) -> Marked:
        labels = dict(zip(picked, (FIRST, SECOND)))
        return [(piece, labels.get(i)) for i, piece in enumerate(self.writer.pieces(reading.tokens))]

    def pick(
        self, reading: Reading, picked: list[int], compare: str, event: gr.SelectData
    ) -> tuple[list[int], Marked]:
        """A click: the token comes first, the one clicked before second."""
        index = event.index[0] if isinstance(event.index, (list, tuple)) else event.index
        picked = [index, *(other for other in picked if other != index)][:2]
        return picked, self.mark(reading, picked, compare)

    def mark(self, reading: Reading, picked: list[int], compare: str) -> Marked:
        """The tokens, with those of the comparison coloured."""
        return self.show_tokens(reading, picked if compare == PREVIOUS else picked[:1])

    def look(self, reading: Reading, picked: list[int], compare: str) -> tuple[Figure | None, Figure | None, str]:
        """-> heatmaps, effective sources, caption."""
        views = self.views(reading, picked, compare)
        if not views:
            return None, None, ""
        lines = [
            f"**{view.title}** reads {sum(view.effective) / len(view.effective):.2f} sources on average over sites, "
            f"{view.effective[-1]:.2f} at the last."
            for view in views
        ]
        return heatmap_figure(views), effective_figure(views), "  \n".join(lines)

    def views(self, reading: Reading, picked: list[int], compare: str) -> list[View]:
        if not picked or picked[0] >= len(reading.weights):
            return []
        views = [self.view(FIRST, self.writer, reading, picked[0])]
        if compare == PREVIOUS and len(picked) == 2:
            views.append(self.view(SECOND, self.writer, reading, picked[1]))
        if compare == OTHER and len(self.models) == 2 and self.models[1].is_routed:
            views.append(self.view(SECOND, self.models[1], self.models[1].read(reading.tokens), picked[0]))
        return views

    def view(self, label: str, model: ExploredModel, reading: Reading, index: int) -> View:
        title = f"{label}: token {index} {self.writer.pieces([reading.tokens[index]])[0]!r}"
        return View(f"{title}, {model.name}" if len(self.models) == 2 else title, model, reading.weights[index])


def build_page(models: list[ExploredModel]) -> gr.Blocks:
    """The layout, wired to a `Page`."""
    page = Page(models)
    title = " and ".join(model.name for model in models)
    choices = [NOTHING, PREVIOUS, *([OTHER] if len(models) == 2 else [])]
    start = "Type a prompt and press Generate."
    if not page.writer.is_routed:
        start = "⚠️ " + NO_ROUTING.format(name=page.writer.name)
    # Without analytics, and with the reader's own fonts (see `explore`), the page asks no other host for anything.
    with gr.Blocks(title=f"Depth routing: {title}", analytics_enabled=False) as blocks:
        gr.Markdown(f"# Where does each site read?\n{title}, {page.writer.config.num_hidden_layers} layers")
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
        caption = gr.Markdown(elem_id="caption")
        weights = gr.Plot(show_label=False, elem_id="weights")
        effective = gr.Plot(show_label=False, elem_id="effective")
        reading, picked = gr.State(Reading()), gr.State([])

        shown = {"fn": page.look, "inputs": [reading, picked, compare], "outputs": [weights, effective, caption]}
        for begin in (button.click, prompt.submit):
            begin(page.generate, [prompt, max_new_tokens, temperature], [tokens, reading, picked, status]).then(
                **shown
            )
        tokens.select(page.pick, [reading, picked, compare], [picked, tokens]).then(**shown)
        compare.change(page.mark, [reading, picked, compare], tokens).then(**shown)
    return blocks


def explore(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    wait: bool = True,
) -> gr.Blocks:
    """Serve the page for one model, or for two to compare, until interrupted (or, without `wait`, until closed)."""
    if not 1 <= len(models) <= 2:
        raise ValueError(f"{len(models)} models were given; explore one, or two to compare.")
    check_address(host, port)
    blocks = build_page([ExploredModel(model, device, dtype) for model in models])
    theme = gr.themes.Default(font=FONTS, font_mono=MONO_FONTS)
    blocks.queue().launch(
        server_name=host,
        server_port=port,
        theme=theme,
        css=CSS,
        footer_links=[],
        ssr_mode=False,
        quiet=not wait,
        prevent_thread_lock=not wait,
        state_session_capacity=100,
    )
    return blocks
