"""The studies: what they measure, their answers, the command line; small runs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvsieve.budget import Budget
from kvsieve.cli import main
from kvsieve.errors import ConfigError
from kvsieve.flow import build_flow
from kvsieve.verify import plots
from kvsieve.verify.accumulator_data import PlantedWindow, PrescribedWindow
from kvsieve.verify.recorded import Recorded, record_forward
from kvsieve.verify.study import STEADY, VARIED, Sweep, planted_increments, study_decay
from kvsieve.verify.study_weights import RATIOS, planted_segments, steps_of, study_weights, weights
from tiny_models import build

pytest.importorskip("kvsieve.integrations.transformers")  # registers the attention that tiny models ask for


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


@pytest.fixture(scope="module")
def study():
    return study_decay(steps=3000, powers=(5, 6, 7, 8, 9))


def test_six_is_the_longest_window_of_bfloat16(study):
    assert study.longest("bfloat16", STEADY) == 6
    assert study.longest("bfloat16", VARIED) >= 6
    assert study.longest("float16", STEADY) == study.longest("float32", STEADY) == 9
    lost = {row.power: row.lost for row in study.of("bfloat16", STEADY)}
    assert lost[5] < 0.1 < lost[6] < 0.2 < lost[7] < 0.33 < lost[8] < 0.5


def test_rows_say_what_freezes_and_what_float32_changes(study):
    undecayed = {row.dtype: row for row in study.rows if row.attention == VARIED and row.power is None}
    frozen = {row.dtype: row.frozen for row in study.rows if row.attention == STEADY and row.power is None}
    assert frozen["bfloat16"] and frozen["float32"] is None
    assert undecayed["bfloat16"].lost > 0.7 and abs(undecayed["float32"].lost) < 1e-5
    assert undecayed["float32"].agree == undecayed["float32"].agree_sum == undecayed["float32"].recall == 1
    assert {row.stored_decay for row in study.of("bfloat16", VARIED) if row.power in (9, None)} == {1.0}
    for row in study.of("float32", VARIED):
        assert row.error < 1e-5 and row.agree == 1 and row.works
    answer = json.loads(json.dumps(study.as_json()))
    assert answer["longest"]["bfloat16"][STEADY] == 6 and len(answer["rows"]) == 2 * 3 * 6


def test_freezing_is_found_at_its_step():
    """One token that gets 1 a step: in bfloat16 the sum stops at 256, in its 256th step, and float16 goes on."""
    sweep = Sweep(torch.ones(1000, 2, dtype=torch.float64), 1.0, 1)
    row = sweep.row("bfloat16", torch.bfloat16, "constant", None)
    assert row.frozen == 257 and row.lost == pytest.approx(1 - 256 / 1000)
    assert sweep.row("float16", torch.float16, "constant", None).frozen is None


def test_planted_data_are_what_their_docstring_says():
    data = PlantedWindow(3, 4000, group=4, head_dim=64, spread=0.5, noise=0.3)
    again = PlantedWindow(3, 4000, group=4, head_dim=64, spread=0.5, noise=0.3)
    assert torch.equal(data.k, again.k) and torch.equal(data.query(), again.query())
    logits = torch.stack([data.k.double() @ data.query().double().mean(0) / 8 for _ in range(200)])
    assert float(logits.mean(0).std()) == pytest.approx(0.5, rel=0.05)
    assert float(logits.std(0).mean()) == pytest.approx(0.15, rel=0.05)
    alone = PrescribedWindow(0, 32)
    assert float(torch.softmax(alone.logits, 0).max()) == pytest.approx(0.28)
    query = alone.query()[0]
    assert torch.equal(alone.k @ query, torch.cat([query, torch.zeros(1)]))


def test_increments_are_the_attention_of_the_mean_query():
    increments = planted_increments(1, 20, 3, 0.3)
    data = PlantedWindow(1, 20, group=4, head_dim=128, noise=0.3)
    for increment in increments:
        q = data.query().double().mean(0)
        torch.testing.assert_close(increment, torch.softmax(data.k.double() @ q * 128**-0.5, 0))


def test_weights_choose_between_mean_and_peak():
    """Pages of 2: page 1 has the larger mean logit, page 2 the larger single one."""
    k = torch.tensor([[0.0], [0.0], [2.0], [2.0], [3.5], [-9.0], [0.0], [0.0], [0.0]])
    step = Recorded(0, k, torch.ones(1, 1, 1), 1.0)
    study = study_weights({"two": [step]}, Budget(topk=1, sink=1, recent=1), 2)
    attention = torch.softmax(k[:, 0], 0)
    mean, peak, rest = attention[2:4].sum(), attention[4:6].sum(), attention[6:8].sum()
    for row in study.rows:
        assert row.captured[0] == pytest.approx(float(mean / (mean + peak + rest)))
        assert row.captured[-1] == row.exact == pytest.approx(float(peak / (mean + peak + rest)))
        assert row.mean_level == pytest.approx(float((2 + (3.5 - 9) / 2) / 3))
        assert row.peak_level == pytest.approx((2 + 3.5 + 0) / 3)
        assert row.best > 0


def test_weights_of_ratios():
    assert weights(math.inf) == {"w_avg": 0.0, "w_peak": 1.0} and weights(0.5) == {"w_avg": 1.0, "w_peak": 0.5}
    assert all(build_flow("h2o_sparse_attention", **weights(ratio)) for ratio in RATIOS)


def test_the_peak_finds_planted_tokens_and_the_exact_choice_is_best():
    study = study_weights({"planted": planted_segments(0, tokens=512, queries=4, count=4)}, Budget(topk=4), 16)
    for row in study.rows:
        assert row.peak_scale > 4 * row.mean_scale and row.peak_level > row.mean_level
        assert row.captured[-1] > row.captured[0] and max(row.captured) <= row.exact
    assert study.as_json()["ratios"][-1] == "inf"


def test_every_query_sees_the_tokens_up_to_its_own():
    segment = Recorded(0, torch.randn(23, 4), torch.randn(3, 2, 4), 0.5)
    lengths = []
    for place, step in enumerate(steps_of(segment, Budget(topk=1, sink=1, recent=1), 4)):
        length = 21 + place
        seen = torch.softmax(segment.q[place] @ segment.k[:length].T * 0.5, -1).sum(0)
        assert torch.allclose(step.attention, seen[4:20].view(4, 4).sum(1))
        lengths.append(len(step.pages))
    assert lengths == [4, 4, 4]


def test_recorded_keys_are_those_of_the_cache_and_give_the_models_attention():
    model = build("llama")
    ids = torch.arange(1, 12)[None]
    segments = record_forward(model, ids, 4)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(ids, output_attentions=True, use_cache=True)
    assert len(segments) == 3 * 2
    for place, segment in enumerate(segments):
        layer, head = divmod(place, 2)
        assert segment.layer == layer and segment.q.shape == (4, 3, 8)
        torch.testing.assert_close(segment.k, output.past_key_values.layers[layer].keys[0, head])
        last = torch.softmax(segment.q[-1] @ segment.k.T * segment.scale, -1)
        torch.testing.assert_close(last, output.attentions[layer][0, 3 * head : 3 * head + 3, -1], atol=1e-5, rtol=1e-4)


def test_recording_leaves_the_model_as_it_was():
    model = build("qwen3")
    before = model.config._attn_implementation
    assert {segment.layer for segment in record_forward(model, torch.arange(1, 9)[None], 2, layers=[1])} == {1}
    assert model.config._attn_implementation == before


def test_decay_command_prints_saves_and_answers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "decay.png"
    assert run("study", "decay", "--steps", "200", "--plot", str(path)) == 0
    shown = capsys.readouterr().out
    assert "bfloat16: longest decay" in shown and "steady attention" in shown and path.read_bytes()[1:4] == b"PNG"


def test_weights_command_needs_no_model(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "weights.png"
    assert run("study", "weights", "--model", "none", "--json", "--plot", str(path)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["segments"] == {"planted": 8} and len(answer["rows"]) == 2 and path.stat().st_size > 5000
    assert run("study", "weights", "--model", "none") == 0
    assert "peak/mean" in capsys.readouterr().out


def test_published_command_says_which_figure_leaves_its_band(capsys, monkeypatch):
    assert run("study", "published", "--seeds", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    monkeypatch.setattr("kvsieve.verify.published.PUBLISHED_FLOW", "gqa_h2o_token_sparse_attention")
    assert run("study", "published", "--seeds", "1") == 1
    assert "NO" in (shown := capsys.readouterr().out) and "FAIL" in shown


def test_plots_without_matplotlib_are_refused_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("kvsieve.cli.study.study_decay", lambda *arguments, **named: 1 / 0)
    assert run("study", "decay", "--plot", str(tmp_path / "x.png")) == 2
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="matplotlib"):
        plots.check_plotting()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["study", "decay", "--steps", "3"], "--steps"),
        (["study", "weights", "--text", "/no/such"], "No such file"),
        (["study", "dcay"], "decay"),
    ],
)
def test_errors_are_one_line(arguments, expected, capsys):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and expected in error
