"""Where a step runs, and on what data, is said once: in the request to load its model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from memopt_cli.errors import UsageError
from memopt_cli.pipeline.prepare import load_request_for
from memopt_cli.records import ModelSource, RankLayout, StepRequest, StepSettings, Trust
from memopt_cli.search.estimation.cards import CARDS

CARD = {"card": CARDS["t4-16gb"]}
RANKS = {"layout": RankLayout(ranks=2, parallel="fsdp", mesh={"dp": 2})}
FAKE = {"fake": True}
INDUCTOR = {"backend": "inductor"}
FILE, CODE = (StepRequest(source=ModelSource(location=at), spec=None) for at in ("model.pt", "train.py:build"))
UNCONFINED = replace(FILE, source=replace(FILE.source, trust=Trust(sandbox=False)))
GPU = StepSettings(device="cuda:1", seed=3)
AUTO = replace(GPU, device="auto")


@pytest.mark.parametrize(
    ("request_", "place", "settings", "data", "device"),
    [
        (FILE, {}, GPU, "full size", "cuda:1"),
        (CODE, {}, AUTO, "full size", "auto"),
        (FILE, FAKE, GPU, "small batch", "cuda:1"),
        (CODE, FAKE, GPU, "none", "cuda:1"),
        (FILE, CARD, AUTO, "small batch", "cpu"),
        (CODE, CARD, AUTO, "small batch", "cpu"),
        (CODE, CARD | FAKE, AUTO, "none", "cpu"),
        (CODE, RANKS, AUTO, "none", "cpu"),
        (CODE, RANKS | CARD, AUTO, "none", "cpu"),
        (CODE, INDUCTOR, AUTO, "full size", "auto"),
        (FILE, {"backend": "aot_eager"}, AUTO, "full size", "auto"),
        (UNCONFINED, INDUCTOR, AUTO, "full size", "auto"),
    ],
)
def test_where_a_step_runs_and_on_what_data(
    request_: StepRequest, place: dict[str, Any], settings: StepSettings, data: str, device: str
) -> None:
    load_request = load_request_for(request_, settings, **place)
    assert (load_request.data, load_request.settings) == (data, replace(settings, device=device))


@pytest.mark.parametrize(
    ("request_", "place", "settings", "refusal"),
    [
        (FILE, CARD, GPU, "`--device cuda:1` runs the step, but `--for t4-16gb`"),
        (CODE, RANKS, GPU, "is predicted on the CPU"),
        (FILE, RANKS, AUTO, "model.pt has parameters"),
    ],
)
def test_a_place_that_does_not_go_with_the_model_or_its_device(
    request_: StepRequest, place: dict[str, Any], settings: StepSettings, refusal: str
) -> None:
    with pytest.raises(UsageError, match=refusal):
        load_request_for(request_, settings, **place)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_no_compiler_is_waited_for_where_the_sandbox_lets_none_start(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    refused = pytest.raises(
        UsageError, match=r"inductor starts a compiler, but the model of model\.pt runs in a sandbox"
    )
    with refused if platform == "linux" else contextlib.nullcontext():  # elsewhere there is no sandbox
        load_request_for(FILE, AUTO, **INDUCTOR)
