"""Backends keep documents apart to the last bit, and let exactly the prefix look ahead."""

import pytest
import torch
from attention_makers import DOCUMENTS, THREE, make_rule, random_heads
from hypothesis import given, settings

from penstock.models.attention import attend

FORWARD = ("per_document", "dense", "flex")
BACKWARD = ("per_document", "dense")


@pytest.mark.parametrize("backend", FORWARD)
def test_together_is_apart(backend: str) -> None:
    q, k, v = random_heads(sum(length for length, _ in THREE))
    together = attend(q, k, v, make_rule(THREE), backend)
    begin = 0
    for length, prefix in THREE:
        one = slice(begin, begin + length)
        alone = attend(q[one], k[one], v[one], make_rule([(length, prefix)]), backend)
        torch.testing.assert_close(together[one], alone, rtol=0, atol=1e-12)
        begin += length


@pytest.mark.parametrize("backend", FORWARD)
def test_other_documents_can_hold_anything(backend: str) -> None:
    rule = make_rule(THREE)
    q, k, v = random_heads(rule.num_slots)
    before = attend(q, k, v, rule, backend)
    k[7:8], v[7:8] = 1e30, -1e30
    after = attend(q, k, v, rule, backend)
    assert torch.equal(after[:7], before[:7])
    assert torch.equal(after[8:], before[8:])


@pytest.mark.parametrize("backend", BACKWARD)
@settings(deadline=None, max_examples=20)
@given(documents=DOCUMENTS)
def test_gradients_reach_exactly_what_is_seen(
    backend: str, documents: list[tuple[int, int]]
) -> None:
    """A gradient is nonzero where the rule says that the query sees the key, and 0 to the last bit
    elsewhere.
    """
    rule = make_rule(documents)
    q, k, v = random_heads(rule.num_slots, heads=2, kv_heads=1, dim=8, gradients=True)
    out = attend(q, k, v, rule, backend)
    seen = rule.dense_mask()
    for query in range(rule.num_slots):
        reach_q, reach_v = torch.autograd.grad(out[query].sum(), (q, v), retain_graph=True)
        assert (reach_v.abs().amax((1, 2)) > 0).tolist() == seen[query].tolist()
        assert not torch.cat([reach_q[:query], reach_q[query + 1 :]]).any(), (
            "of other queries nothing is used"
        )
        reach_k = torch.autograd.grad((out[query] ** 2).sum(), k, retain_graph=True)[0]
        assert not reach_k[torch.from_numpy(~seen[query])].any()
