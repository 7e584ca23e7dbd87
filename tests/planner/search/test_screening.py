"""The screener ranks by a model of another policy: no layout that it ranks behind may serve much more."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

pytest.importorskip("numba", reason="the search needs the planner's extra")

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.search.goodput import Runner, Trial
from pdserve.planner.search.goodput import Workload as RequestSource
from pdserve.planner.search.plan import Effort, Question, Space, Supply
from pdserve.planner.search.search import find_plan
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.workload import Workload
from tests.planner.stand_ins import H100, LLAMA_3_8B, PoissonWorkload

AGENTS = Workload(
    name="agents",
    contents=Conversations(
        lengths=LogNormalLengths(
            mean_prompt_tokens=600, mean_output_tokens=40, prompt_variation=1.5, output_variation=1.0
        ),
        system_prompts=SystemPrompts(num_prompts=4, num_tokens=2000),
        turns=Turns(mean_turns=3.0, mean_think_s=0.5),
    ),
)


@pytest.mark.parametrize(
    ("workload", "slo", "num_requests"),
    [
        pytest.param(PoissonWorkload(1500, 20), SloConfig(ttft_seconds=0.2, tpot_seconds=0.02), 150, id="prompts"),
        pytest.param(PoissonWorkload(300, 80), SloConfig(ttft_seconds=0.5, tpot_seconds=0.015), 400, id="answers"),
        pytest.param(AGENTS, SloConfig(ttft_seconds=0.5, tpot_seconds=0.02), 150, id="agents"),
    ],
)
def test_what_was_screened_out_serves_a_few_percent_more_at_most(
    workload: RequestSource, slo: SloConfig, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs are short: their rates are too high, but of all layouts."""
    monkeypatch.setattr(Trial, "most_rate", inf)
    question = Question(
        model=replace(LLAMA_3_8B, max_model_len=32768),
        slo=slo,
        fleet=(Supply(hardware=H100, devices_per_node=3),),
        space=Space(pipeline_parallel=(1,), tensor_parallel=(1,), mixed_batch_tokens=(512, 2048)),
        effort=Effort(
            screen_requests=2000, final_requests=num_requests, num_screened=4, num_finalists=2, tolerance=0.04
        ),
    )
    plan = find_plan(question, workload, num_processes=1)
    screened_out = [each.layout for each in plan.candidates if each.goodput is None]
    assert screened_out
    runner = Runner(workload)
    for layout in screened_out:
        trial = Trial(model=question.model, layout=layout, slo=slo, num_requests=num_requests)
        seen = runner.attainment(trial, 1.1 * plan.best.rate)
        assert not seen.surely_meets(slo.attainment), f"{layout}, beside {plan.best.layout}"
