from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkv_serve.cli import app
from agentkv_serve.engine.policies import AutoBudget, get_policy, policy_names
from agentkv_serve.evaluation.ablate import entrants
from agentkv_serve.evaluation.arms import Budget, Entrant, arms_of
from agentkv_serve.evaluation.cli import parse_policies

from . import runs


def test_budgets() -> None:
    assert Budget.parse("12.5%") == Budget.parse("0.125")
    assert Budget.parse("12.5%").of(3072) == 384
    assert Budget.parse("512").of(3072) == 512
    assert Budget.parse("auto:0.05").auto == AutoBudget(price=0.05, floor=384)
    assert Budget.parse("auto").of(3072) == 3071
    told = Budget.parse("auto:0.05[loss=lost_mass;floor=64;epsilon=0.1]")
    assert told.auto == AutoBudget(price=0.05, epsilon=0.1, floor=64, loss="lost_mass")
    for text in ("auto:little", "auto:0.1[lost=1]", "auto:0.1[floor=64", "0", "-5%", "many", "120%", "1e9%"):
        with pytest.raises(ValueError, match="neither a share"):
            Budget.parse(text)


def test_a_budget_must_hold_what_a_policy_always_keeps() -> None:
    named = [Entrant("agentkv", get_policy("agentkv"))]
    assert not arms_of(named, [Budget.parse("512")], 512, "others")
    assert [arm.budget for arm in arms_of(named, [Budget.parse("512")], 512, "others", whole=True)] == [512]
    with pytest.raises(ValueError, match="needs a budget of 65"):
        arms_of(named, [Budget.parse("64")], 512, "others")


def test_policies_on_the_command_line() -> None:
    text = "agentkv, agentkv[queries_per_phase=16;value_power=1.0],rkv"
    assert parse_policies(text) == [
        ("agentkv", "agentkv", {}),
        ("agentkv[queries_per_phase=16;value_power=1.0]", "agentkv", {"queries_per_phase": 16, "value_power": 1.0}),
        ("rkv", "rkv", {}),
    ]
    assert [name for name, _, _ in parse_policies("all")] == [name for name in policy_names() if name != "full"]


def test_ablations() -> None:
    assert [entrant.name for entrant in entrants(["samplers"])] == [
        "agentkv",
        "strided sampler",
        "farthest-point sampler",
    ]
    with pytest.raises(ValueError, match="unknown group nonsense"):
        entrants(["nonsense"])


def run(folder: Path, traces: Path, out: Path, command: str = "quality", **options: str) -> dict:
    arguments = ["eval", command, "--traces", str(traces), "--json", str(out), "--model", str(folder)]
    arguments += ["--length", "400", "--least", "100"]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return dict(json.loads(out.read_text()))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([{"task_id": n, "trial": 0, "traj": runs.messages(3)} for n in (0, 2)]))
    return file


def test_quality_is_resumable(folder: Path, traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "quality.json"
    policies = "agentkv,recent,triattention[recent=8]"
    first = run(folder, traces, out, policies=policies, budget="25%,50%")
    assert len(first["per_trajectory"]) == 2
    assert set(first["policies"]) == {"agentkv", "recent", "triattention[recent=8]"}
    assert {"kl", "kl_think", "kl_act", "copy_acc", "sharp_miss", "top1", "kv_tokens"} <= set(
        first["policies"]["recent"]
    )
    assert first["policies"]["recent"]["kl"] > 0
    theirs, ours = first["paired"]["recent"]["kl"], first["order"]["50%"]["recent"]["kl"]
    assert ours["difference"] == -theirs["difference"]
    assert ours["better_in"] == theirs["worse_in"]
    assert first["plus"] == {}
    page = out.with_suffix(".md").read_text()
    assert "| recent |" in page
    assert "| 25% | recent |" in page
    assert "agentkv_plus, paired" not in page
    assert out.with_name("quality-budgets.png").stat().st_size > 5000
    files = sorted(out.with_suffix("").glob("*.json"))
    before = [json.loads(file.read_text()) for file in files]

    again = run(folder, traces, out, policies=policies, budget="25%,50%")
    assert [json.loads(file.read_text()) for file in files] == before
    assert again["policies"] == first["policies"]

    run(folder, traces, out, policies="agentkv,recent,agentkv_paper", budget="25%")
    for file, record in zip(files, before, strict=True):
        now = json.loads(file.read_text())
        assert set(now["arms"]) == {*record["arms"], "agentkv_paper@25%"}
        assert all(now["arms"][arm] == entry for arm, entry in record["arms"].items())

    cut = run(folder, traces, out, policies="agentkv", budget="25%", chunk="64")
    assert cut["protocol"]["chunk"] == 64
    for file, record in zip(files, before, strict=True):
        now = json.loads(file.read_text())["arms"]
        assert now["agentkv@25%"]["hash"] != record["arms"]["agentkv@25%"]["hash"]
        assert now["recent@25%"] == record["arms"]["recent@25%"]


def test_the_split_selects(folder: Path, traces: Path, tmp_path: Path) -> None:
    found = run(folder, traces, tmp_path / "q.json", policies="agentkv", budget="50%", split="report")
    assert [record["task"] for record in found["per_trajectory"]] == ["runs/task2"]


def test_ablate(folder: Path, traces: Path, tmp_path: Path) -> None:
    found = run(folder, traces, tmp_path / "a.json", "ablate", budget="50%", only="samplers,labels,phases,redundancy")
    kl = {name: values["kl"] for name, values in found["budgets"]["50%"]["policies"].items()}
    assert len(set(kl.values())) > 8, "variants differ"
    assert "| with redundancy |" in (tmp_path / "a.md").read_text()


def test_auto_against_fixed(folder: Path, traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "auto.json"
    options = {"policy": "agentkv[sinks=4;recent=8]", "measured-from": "40"}
    options |= {"auto": "0.02[floor=40],auto:0.2[floor=40]", "fixed": "48,96,900,20%,60%"}
    found = run(folder, traces, out, "auto", **options)
    assert (found["trajectories"], found["tasks"]) == (2, 2)
    strict, loose = found["auto"]["auto:0.02[floor=40]"], found["auto"]["auto:0.2[floor=40]"]
    assert strict["kv_tokens"] >= loose["kv_tokens"] and strict["kl"] <= loose["kl"]
    assert set(found["fixed"]) == set(strict["against"]) == {"tokens", "shares"}
    small, whole = (found["fixed"]["tokens"][budget] for budget in ("48", "900"))
    assert whole["kl"] == 0, "a budget above the run's length keeps everything"
    assert small["kl"] > 0 and whole["kv_tokens"] > small["kv_tokens"]
    best = strict["hindsight_kl_at_equal_tokens"]
    assert best is None or 0 <= best <= strict["against"]["tokens"]["fixed_kl_at_equal_tokens"]
    page = out.with_suffix(".md").read_text()
    assert "| 48 |" in page and "Against one share of each run's whole length:" in page
    assert out.with_suffix(".png").stat().st_size > 5000


def test_a_refusal_says_what_to_do(folder: Path, traces: Path, tmp_path: Path) -> None:
    arguments = ["eval", "quality", "--traces", str(traces), "--json", str(tmp_path / "q.json"), "--model", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "--policies", "best"])
    assert done.exit_code == 1
    assert "unknown policy 'best'" in done.output
