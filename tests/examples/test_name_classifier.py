"""Names as one-hot letters, padded and packed; a classifier that learns from them, batched as unbatched."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from memopt_cli.errors import BatchShapeError, UsageError
from tests.examples.loaded import example

NAMES = ["Shyam", "Ram", "O'Neill", "Lee"]


names_module = example("name_batches")
LANGUAGES, LETTERS = names_module.LANGUAGES, names_module.LETTERS
batched_dataloader, pack_names = names_module.batched_dataloader, names_module.pack_names
batched_lang_rep, batched_name_rep = names_module.batched_lang_rep, names_module.batched_name_rep
print_char, train_batch, top_k_accuracy = names_module.print_char, names_module.train_batch, names_module.top_k_accuracy


@pytest.fixture(scope="module")
def classifier() -> Any:
    return example("name_classifier")  # which finds the other example among the modules that are imported


def test_the_documented_example() -> None:
    rep = batched_name_rep(["Shyam", "Ram"], 5)
    assert rep.shape == (5, 2, len(LETTERS)) == (5, 2, 57)
    assert rep.sum(2).tolist() == [[1, 1], [1, 1], [1, 1], [1, 0], [1, 0]]
    packed = pack_names(["Shyam", "Ram"])
    assert packed.data.shape == (8, 57)
    assert packed.batch_sizes.tolist() == [2, 2, 2, 1, 1]


def test_letters_are_written_in_the_order_of_memory() -> None:
    out = io.StringIO()
    print_char(batched_name_rep(["abc", "X"], 3), out)
    assert out.getvalue().split("\n") == ["a", "X", "b", "<pad>", "c", "<pad>", ""]


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match="'Dvořák' has the letter 'ř'"):
        batched_name_rep(["Dvořák"], 9)
    for names, size in ((["Shyam"], 4), ([""], 4)):
        with pytest.raises(BatchShapeError, match=f"1 to {size} fit"):
            batched_name_rep(names, size)
    with pytest.raises(UsageError, match="unknown language 'Klingon'"):
        batched_lang_rep(["Greek", "Klingon"])


def test_drawing_is_with_replacement_and_seeded(capsys: pytest.CaptureFixture[str]) -> None:
    langs = ["English", "English", "Irish", "Korean"]

    def draw(seed: int, **options: Any) -> Any:
        return batched_dataloader(9, NAMES, langs, generator=torch.Generator().manual_seed(seed), **options)

    packed, labels = draw(1)
    assert labels.shape == (9,)
    assert packed.batch_sizes[0] == 9
    assert torch.equal(packed.data, draw(1)[0].data)
    assert not torch.equal(labels, draw(2)[1])
    assert capsys.readouterr().out == ""
    draw(1, verbose=True)
    written = capsys.readouterr().out
    assert f"packed {tuple(packed.data.shape)}" in written
    assert f"labels {labels.tolist()}" in written
    for count, names in ((0, NAMES), (1, []), (1, NAMES[:2])):
        with pytest.raises(UsageError, match="cannot draw"):
            batched_dataloader(count, names, langs)


def test_batched_equals_unbatched(classifier: Any) -> None:
    """Scores, hidden state, loss and every gradient, to 1e-10 in float64."""
    torch.manual_seed(0)
    net = classifier.NameClassifier(hidden=6).double()
    alone = copy.deepcopy(net)
    truth = batched_lang_rep(["English", "English", "Irish", "Korean"])

    def as_double(names: list[str]) -> Any:
        return pack_names(names).to(torch.float64)

    scores, hidden = net(as_double(NAMES))
    nn.functional.nll_loss(scores, truth).backward()
    for i, name in enumerate(NAMES):
        score, state = alone(as_double([name]))
        assert torch.allclose(score[0], scores[i], atol=1e-10, rtol=0)
        assert torch.allclose(state[:, 0], hidden[:, i], atol=1e-10, rtol=0)
        (nn.functional.nll_loss(score, truth[i : i + 1]) / len(NAMES)).backward()
    for batched, single in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(batched.grad, single.grad, atol=1e-10, rtol=0)
        assert batched.grad.abs().max() > 1e-6


@pytest.mark.slow
def test_one_update_learns(classifier: Any) -> None:
    torch.manual_seed(0)
    net = classifier.NameClassifier(hidden=16)
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    langs = ["English", "English", "Irish", "Korean"]
    losses = [train_batch(net, opt, nn.NLLLoss(), 8, x=NAMES, y=langs) for _ in range(25)]
    assert losses[0].shape == ()
    assert not losses[0].requires_grad
    assert losses[-1] < 0.5 * losses[0]
    assert top_k_accuracy(net, 40, 1, NAMES, langs) > 0.9


def test_accuracy_is_the_share_of_hits_and_the_mode_is_put_back() -> None:
    class Fixed(nn.Module):
        """Always Greek, then Arabic."""

        def forward(self, names: Any) -> tuple[torch.Tensor, None]:
            assert not self.training
            scores = torch.zeros(int(names.batch_sizes[0]), len(LANGUAGES))
            scores[:, LANGUAGES.index("Greek")] = 2
            scores[:, LANGUAGES.index("Arabic")] = 1
            return scores, None

    net = Fixed().train()
    langs = ["Greek", "Arabic", "Dutch", "Dutch"]
    first = top_k_accuracy(net, 400, 1, NAMES, langs, generator=torch.Generator().manual_seed(0))
    second = names_module.eval(net, 400, 2, NAMES, langs, generator=torch.Generator().manual_seed(0))
    assert 0.15 < first < 0.35
    assert 0.4 < second < 0.6
    assert net.training
