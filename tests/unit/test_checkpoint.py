"""Composable activation checkpointing, without replicas."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradsync.checkpoint import CheckpointModule, CheckpointState, checkpoint
from gradsync.contract import registry
from gradsync.errors import AlreadyAppliedError, UnsuitableForCheckpointError
from tests.support.blocks import (
    Block,
    Sometimes,
    alive_after_forward,
    assert_same_gradients,
    both,
    counting_saved,
    stack,
    step,
)
from tests.support.ranks import on_ranks


@pytest.fixture(scope="module", autouse=True)
def _torch_was_here() -> None:
    """torch's first checkpoint imports dynamo, which sets an environment variable: not a test's doing."""
    torch_checkpoint(torch.sin, torch.ones(1), use_reentrant=False)


def test_in_place_with_the_same_names() -> None:
    module = stack()
    names = [name for name, _ in module.named_parameters()], list(module.state_dict()), len(list(module.modules()))
    assert checkpoint(module[0]) is module[0]
    assert names == (
        [name for name, _ in module.named_parameters()],
        list(module.state_dict()),
        len(list(module.modules())),
    )
    assert isinstance(module[0], Block)
    assert isinstance(module[0], CheckpointModule)
    assert type(module[0]).__name__ == "Block"
    assert repr(module[0]).startswith("CheckpointBlock(")
    assert not module[0]._forward_hooks
    assert not module[0]._forward_pre_hooks
    assert list(registry(module[0])) == ["checkpoint"]
    assert isinstance(checkpoint.state(module[0]), CheckpointState)
    assert checkpoint.state(module[1]) is None
    with pytest.raises(AlreadyAppliedError):
        checkpoint(module[0])


@pytest.mark.parametrize("where", ["block", "both", "root", "nested"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_the_same_to_the_last_bit(where: str, dropout: float) -> None:
    plain, module = both(lambda: stack(dropout))
    chosen = {"block": [module[0]], "both": module[:2], "root": [module], "nested": [module, *module[:2]]}[where]
    for part in chosen:
        checkpoint(part)
    x = torch.randn(3, 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    assert torch.equal(step(plain, x), step(module, y))
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert_same_gradients(plain, module)
    for part in [module[0]] if where == "block" else module[:2]:
        assert part.forwards >= 2, "it was recomputed"


def test_generators_are_left_alone_on_request_only() -> None:
    module = checkpoint(nn.Dropout(0.5), preserve_rng_state=False)
    plain = nn.Dropout(0.5)
    x = torch.ones(1000, requires_grad=True)
    y = torch.ones(1000, requires_grad=True)
    step(module, x)
    step(plain, y)
    assert x.grad is not None
    assert not torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_memory_is_saved() -> None:
    def deep() -> nn.Module:
        parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(8)]
        return nn.Sequential(*parts)

    plain, module = both(deep)
    for part in module:
        checkpoint(part)
    x = torch.randn(3, 4)
    assert alive_after_forward(plain, x) == 16, "the test itself: what each Tanh returns is kept"
    assert alive_after_forward(module, x) == 8, "what each part returns"
    assert alive_after_forward(checkpoint(module), x) == 1


def test_an_outer_counter_sees_only_inputs() -> None:
    plain, module = both(stack)
    checkpoint(module)
    x = torch.randn(64, 4)
    with counting_saved() as many:
        plain(x)
    with counting_saved() as few:
        module(x)
    assert few[0] <= x.numel()
    assert many[0] > 5 * x.numel()


class Result(NamedTuple):
    total: Tensor
    rest: dict[str, list[Tensor]]


class Branchy(nn.Module):
    """Many kinds of inputs and outputs. Its arguments are named to collide with those of torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        pair: tuple[Tensor, list[Tensor]],
        *more: Tensor,
        debug: Tensor,
        context_fn: Any = (),
        **kw: Any,
    ) -> Result:
        hidden = self.linear(x).tanh() * self.linear(debug).tanh()
        for tensor in (pair[0], *pair[1], *more, *kw.values()):
            hidden = hidden * tensor.sin()
        return Result(hidden, {"parts": [hidden.exp(), hidden.cos()], "given": list(context_fn)})


def test_inputs_and_outputs_of_all_kinds() -> None:
    torch.manual_seed(0)
    plain, module = both(Branchy)
    checkpoint(module)

    def run(which: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x, *others = (torch.randn(3, 4, requires_grad=True) for _ in range(8))
        result = step(
            which, x, (others[0], [others[1], others[2]]), others[3],
            debug=others[4], function=others[5], preserve_rng_state=others[6],
        )  # fmt: skip
        assert isinstance(result, Result)
        assert all(tensor.grad is not None for tensor in (x, *others))
        return [tensor.grad for tensor in (x, *others) if tensor.grad is not None]

    for a, b in zip(run(plain), run(module), strict=True):
        assert torch.equal(a, b)
    assert_same_gradients(plain, module)


def test_a_keyword_input_that_was_written_to_is_noticed() -> None:
    """torch's own would compute a wrong gradient from it and say nothing."""

    class Scale(nn.Module):
        def forward(self, x: Tensor, *, factor: Tensor) -> Tensor:
            return (x * factor).sin()

    module = checkpoint(Scale())
    x, factor = torch.ones(2, requires_grad=True), torch.ones(2)
    output = module(x, factor=factor)
    factor.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_hooks_run_once_a_forward() -> None:
    module = stack()[0]
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    checkpoint(module)
    module.register_forward_pre_hook(lambda *_: calls.append("late"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    step(module, torch.randn(3, 4, requires_grad=True))
    assert calls == ["before", "late", "after", "backward"]
    assert module.forwards == 2


def test_a_hook_that_changes_the_input() -> None:
    plain, module = both(stack)
    checkpoint(module[0])
    for which in (plain, module):
        which[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        which[0].register_forward_hook(lambda _, args, output: output.square())
        step(which, torch.ones(3, 4))
    assert_same_gradients(plain, module)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(mode: Callable[[], Any]) -> None:
    def contexts() -> Any:
        raise AssertionError("not needed")

    plain, module = both(stack)
    checkpoint(module, context_fn=contexts)
    with mode():
        assert torch.equal(module(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    assert module[0].forwards == 1


def test_retained_graphs_and_partial_gradients() -> None:
    plain, module = both(stack)
    checkpoint(module[0])
    x = torch.randn(3, 4, requires_grad=True)
    found = []
    for which in (plain, module):
        loss = which(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append((gradient.detach(), second))
    torch.testing.assert_close(found[0], found[1])
    assert_same_gradients(plain, module)


@pytest.mark.parametrize("odd_one", [1, 2], ids=["forward", "recomputation"])
@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_an_error_leaves_nothing_behind(odd_one: int, how: str) -> None:
    torch.manual_seed(0)
    module = checkpoint(Sometimes(odd_one, how))
    plain = Sometimes(-1, "")
    plain.load_state_dict(module.state_dict())
    x = torch.randn(3, 4)
    with pytest.raises(KeyError if how == "raise" else KeyboardInterrupt):
        step(module, x)
    with counting_saved() as kept:
        x.requires_grad_().sin()
    assert kept[0] == x.numel(), "hooks of the failed forward are still there"
    module.zero_grad()
    for which in (plain, module):
        step(which, x)
    assert_same_gradients(plain, module)


@pytest.mark.parametrize(("how", "text"), [("shape", "different metadata"), ("fewer", "different number of tensors")])
def test_a_different_recomputation_is_noticed(how: str, text: str) -> None:
    module = checkpoint(Sometimes(2, how), early_stop=False)
    with pytest.raises(CheckpointError, match=text):
        step(module, torch.randn(3, 4))
    module.zero_grad()
    step(module, torch.randn(3, 4))


def test_the_check_can_be_turned_off() -> None:
    class Growing(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * torch.ones(1 if self.calls == 1 else 3)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CheckpointError):
        step(checkpoint(Growing()), x)
    step(checkpoint(Growing(), determinism_check="none"), x)


@on_ranks(1, limit=60, backend=None)
def test_debug_shows_the_operators() -> None:
    """On a rank, for torch starts programs to read its stack, and leaves them running."""
    module = checkpoint(Sometimes(2, "shape"), debug=True)
    with pytest.raises(CheckpointError, match="Operations executed during the original forward"):
        step(module, torch.randn(3, 4))


@pytest.mark.parametrize("early", [True, False])
def test_early_stop(early: bool) -> None:
    reached = []

    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            output = x.sin()
            reached.append("before")
            doubled = output * 2
            reached.append("end")
            return doubled

    step(checkpoint(Tail(), early_stop=early), torch.ones(2, requires_grad=True))
    assert reached == ["before", "end"] if early else ["before", "end"] * 2


def test_contexts() -> None:
    entered = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    module = checkpoint(stack(), context_fn=lambda: (context("forward"), context("recomputation")), early_stop=False)
    step(module, torch.ones(1, 4))
    assert entered == ["forward", "end of forward", "recomputation", "end of recomputation"]


def test_selective() -> None:
    """A forward whose matrix products are kept: the public way of torch."""
    computed = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            computed.append(str(function))
            return function(*args, **(kwargs or {}))

    def policy(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = function is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    plain, module = both(stack)
    checkpoint(module, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    x = torch.randn(3, 4)
    step(plain, x)
    output = module(x)
    with Spy():
        output.square().sum().backward()
    assert_same_gradients(plain, module)
    assert "aten.tanh.default" in computed
    assert "aten.addmm.default" not in computed


def test_autocast_is_repeated() -> None:
    types = []

    class Typed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            types.append((output := super().forward(input)).dtype)
            return output.sin()

    module = checkpoint(Typed(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        output = module(torch.ones(1, 4))
    output.sum().backward()
    assert types == [torch.bfloat16] * 2


class Counting(nn.Module):
    """Its buffers are written to in place, replaced, and left alone."""

    written: Tensor
    replaced: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        return (x * self.constant).sin().cos()


@pytest.mark.parametrize("early", [True, False])
def test_buffers_are_as_after_one_forward(early: bool) -> None:
    def norms() -> nn.Module:
        torch.manual_seed(0)
        uncounted = nn.BatchNorm1d(4)
        uncounted.num_batches_tracked = None
        instances = nn.InstanceNorm1d(4, track_running_stats=True)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(4), Counting(), instances, uncounted, nn.Tanh())

    plain, module = both(norms)
    checkpoint(module, early_stop=early)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(5, 4, 6)
        for which in (plain, module):
            pair = [which(x + 1), which(x * 3)]  # two forwards before one backward
            objects = list(which.buffers())
            sum(output.square().sum() for output in pair).backward()
            assert all(a is b for a, b in zip(objects, which.buffers(), strict=True))
    for (name, found), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert module[2].written == 6
    assert_same_gradients(plain, module)


def test_a_norm_used_inside_and_outside() -> None:
    """Putting running statistics back must not look like a change to what the outer use saved."""
    norm = nn.BatchNorm1d(4)
    inside = checkpoint(nn.Sequential(nn.Linear(4, 4), norm))
    step(nn.Sequential(norm, inside, norm), torch.randn(5, 4))
    assert norm.num_batches_tracked == 3


def test_options_are_checked_at_once_and_the_call_can_be_repeated() -> None:
    module: Any = Block()
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"use_reentrant": True},
            NotImplementedError,
            "use_reentrant=True is not supported in composable checkpoint. ",
        ),
        ({"foo": 1}, ValueError, "Unexpected keyword arguments: foo"),
        ({"determinism_check": "some"}, ValueError, "determinism_check should be one of"),
        ({"debug": True, "context_fn": lambda: None}, ValueError, "debug=True is incompatible"),
    ]
    for options, error, text in refused:
        with pytest.raises(error) as caught:
            checkpoint(module, **options)
        assert str(caught.value).startswith(text)
        assert type(module) is Block
        assert registry(module) == {}
    checkpoint(module, use_reentrant=False)
    step(module, torch.ones(1, 4))


def test_where_it_would_do_nothing() -> None:
    with pytest.raises(UnsuitableForCheckpointError, match="ModuleList has no forward"):
        checkpoint(nn.ModuleList([Block()]))
    replaced = Block()
    replaced.forward = torch.sin  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="forward was replaced on the object"):
        checkpoint(replaced)
    with pytest.raises(TypeError, match="one module"):
        checkpoint([Block()])


def test_a_slice_is_not_checkpointed() -> None:
    part: Any = checkpoint(stack())[:1]
    step(part, torch.ones(1, 4))
    assert part[0].forwards == 1


def contexts() -> Any:
    return contextlib.nullcontext(), contextlib.nullcontext()


def test_copies_and_pickles() -> None:
    plain, module = both(lambda: stack(0.5))
    checkpoint(module[0], context_fn=contexts, early_stop=False)
    duplicate = copy.deepcopy(module)
    state = checkpoint.state(duplicate[0])
    assert state is not None
    assert state is not checkpoint.state(module[0])
    assert state.options == checkpoint.state(module[0]).options  # type: ignore[union-attr]
    for which in (plain, module, duplicate):
        step(which, torch.ones(3, 4))
    assert_same_gradients(plain, module)
    assert_same_gradients(plain, duplicate)
    assert duplicate[0].forwards == 2
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded[0]) is Block


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_compiled_in_one_graph() -> None:
    def norms() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout(0.5)), nn.BatchNorm1d(4), nn.Tanh())

    plain, module = both(norms)
    for part in (module[1], module):
        checkpoint(part)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = torch.randn(5, 4)
        assert torch.equal(step(plain, x, seed=seed), step(compiled, x, seed=seed))
    assert_same_gradients(plain, module)
    for found, expected in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)
