"""What is replaced in a module is noticed, at the latest after some rounds."""

import torch
from torch import nn

from gradsync.engine.module_snapshot import LOOK_ANYWAY, ModuleSnapshot


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rest = nn.Sequential(nn.BatchNorm1d(2), nn.Tanh())


def module() -> Small:
    return Small()


def test_nothing_changed() -> None:
    made = module()
    for name in ("_parameters", "_modules", "_buffers"):
        snapshot = ModuleSnapshot([made], name)
        assert not any(snapshot.look_for_changes() for _ in range(3 * LOOK_ANYWAY))
        assert not snapshot.look_for_changes(doubt=True)
        assert not snapshot.replaced()


def test_what_is_registered_anew_is_noticed_at_once() -> None:
    made = module()
    parameters, modules = ModuleSnapshot([made], "_parameters"), ModuleSnapshot([made], "_modules")
    made.linear.weight = nn.Parameter(torch.ones(2, 2))
    assert parameters.look_for_changes()
    assert not modules.look_for_changes()
    made.rest[1] = nn.ReLU()
    assert modules.look_for_changes()


def test_a_new_submodule_and_a_new_parameter() -> None:
    made = module()
    parameters, modules = ModuleSnapshot([made], "_parameters"), ModuleSnapshot([made], "_modules")
    made.rest[1].register_parameter("scale", nn.Parameter(torch.ones(1)))  # in a table that was empty
    made.add_module("more", nn.Tanh())
    assert parameters.look_for_changes()
    assert modules.look_for_changes()


def test_a_table_written_to_directly_is_noticed_in_doubt_or_in_time() -> None:
    made = module()
    snapshot = ModuleSnapshot([made], "_parameters")
    made.linear._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    assert not snapshot.look_for_changes()
    assert snapshot.look_for_changes(doubt=True)

    made = module()
    snapshot = ModuleSnapshot([made], "_parameters")
    made.linear._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    assert any(snapshot.look_for_changes() for _ in range(LOOK_ANYWAY))


def test_buffers_replaced_by_a_conversion() -> None:
    made = module()
    snapshot = ModuleSnapshot([made], "_buffers")
    made.double()
    assert snapshot.replaced()
