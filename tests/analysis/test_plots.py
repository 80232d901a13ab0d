"""Figures have labels, a residual type has one colour, and the same numbers give the same file."""

import matplotlib
import pytest
import torch
from common import random_tokens, small_model

from lr_attnres.analysis import plots
from lr_attnres.analysis.routing import analyze_model
from lr_attnres.data.held_out import make_batches


def analysis(variant: str, **overrides):
    tokens = random_tokens(4, 8)
    rows = [{"input_ids": row, "position_ids": torch.arange(8), "labels": row} for row in tokens]
    return analyze_model(small_model(variant, **overrides), make_batches(rows, 4))


@pytest.fixture(scope="module")
def analyses():
    torch.manual_seed(0)
    variants = ["standard", "attnres_full", "projected_block", "sliced_block"]
    return [*map(analysis, variants), analysis("sliced_full"), analysis("sliced_full", depth_key_rank=16)]


@pytest.mark.parametrize("name", [name for name in plots.FIGURES if name != "gradient_norms"])
def test_every_axis_is_labelled(name, analyses):
    figure = plots.make_figure(name, analyses)
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]
    assert len(panels) == (5 if name in ("depth_weights", "shares") else 1)
    for axes in panels:
        assert axes.get_title() and axes.get_xlabel()
    assert panels[0].get_ylabel()


@pytest.mark.parametrize("name", ["effective_sources", "output_magnitude", "query_norms", "entropy_by_position"])
def test_a_variant_has_one_colour_and_its_models_differ_in_line(name, analyses):
    lines = {line.get_label(): line for line in plots.make_figure(name, analyses).axes[0].get_lines()}
    chosen = [lines[a.name] for a in analyses if a.name in lines]
    assert len(chosen) == len(analyses) - (name != "output_magnitude")
    for a in analyses:
        if a.name in lines:
            assert lines[a.name].get_color() == plots.COLOURS[a.residual_type]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in chosen}
    assert len(looks) == len(chosen)


def test_each_number_of_available_sources_has_its_own_name(analyses):
    axes = plots.make_figure("effective_sources", analyses).axes[0]
    names = {text.get_text(): text.xy for text in axes.texts}
    assert names == {"available sources, full": (8, 9), "available sources, 3 blocks": (8, 4)}


def test_depth_heads_are_a_band_around_their_mean():
    model = analysis("sliced_block_heads")
    heads, mean = model.tensors["head_effective_sources"], model.tensors["effective_sources"]
    (band,) = plots.make_figure("effective_sources", [model]).axes[0].collections
    box = band.get_paths()[0].get_extents()
    assert (box.y0, box.y1) == pytest.approx((heads.min().item(), heads.max().item())) and (box.x0, box.x1) == (1, 8)
    assert heads.shape == (8, 4) and torch.equal(heads.mean(1), mean) and heads.std(1).min() > 0


def test_heatmaps_are_clipped_and_keep_missing_sources_blank(analyses):
    axes = plots.depth_weights_figure(analyses[3:4]).axes[0]
    weights = analyses[3].tensors["depth_weights"]
    (image,) = axes.get_images()
    top = torch.quantile(weights[~weights.isnan()], 0.995).item()
    assert image.get_clim() == pytest.approx((0, top)) and top < weights.nan_to_num(0).max()
    assert (image.get_array().mask == weights.isnan().numpy()).all()
    (dots,) = axes.collections
    assert len(dots.get_offsets()) == sum(site not in analyses[3].block_ends for site in range(1, 9))


def test_standard_alone_has_no_routing_figures(analyses, tmp_path):
    names = [path.stem for path in plots.draw(analyses[:1], tmp_path)]
    assert names == ["output_magnitude", "loss_against_flops"]


def test_gradient_norms_of_the_models_that_have_one(analyses):
    for norm, a in zip((0.9775, 1.003), analyses):
        a.gradient_norm = norm
    (axes,) = plots.make_figure("gradient_norms", analyses).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["standard", "attnres-full"]
    assert [bar.get_width() for bar in axes.patches] == [0.9775, 1.003]
    assert [text.get_text() for text in axes.texts] == ["0.9775", "1.0030"]
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in axes.patches]
    assert colours == [plots.COLOURS["standard"], plots.COLOURS["attnres"]]


def test_the_same_numbers_give_the_same_files(analyses, tmp_path):
    with matplotlib.rc_context(plots.STYLE):
        for name in ("first", "second"):
            plots.save_figure(plots.make_figure("shares", analyses), tmp_path / name)
    for end in (".svg", ".png"):
        assert (tmp_path / f"first{end}").read_bytes() == (tmp_path / f"second{end}").read_bytes()


def test_labels_of_crowded_points_do_not_touch(tmp_path):
    path = plots.draw_paper(str(tmp_path / "paper.png"))
    assert path.exists() and path.with_suffix(".svg").exists()
    points = [(f"sliced-full-r{i}", "sliced", 1 + 0.01 * i, 3 + 0.001 * i) for i in range(6)]
    figure = plots.loss_against_flops(points, "loss")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
