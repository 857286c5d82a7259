"""`torchrun --max-restarts`: the script of docs/faults.md goes on from its checkpoint, as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gradsync import restarts
from gradsync.transport.membership import Membership
from tests.docs.test_recipes import blocks
from tests.ranks.small import backward, build, make, same_everywhere
from tests.support.children import FORKS_BESIDE_THREADS
from tests.support.hosts import Host, hosts_or_skip
from tests.support.patience import crowding
from tests.support.ranks import Ranks, _free_port, on_ranks
from tests.watch.test_last_words import run

(RECIPE,) = [code for name, code in blocks() if name == "faults.md: Restarting after a fault"]
# What goes wrong in rank 1, in which step of which start.
FAULTS = """
def fail(step):
    import signal
    fault = {faults}.get((int(os.environ["TORCHELASTIC_RESTART_COUNT"]), step))
    if int(os.environ["RANK"]) == 1 and fault == "raise":
        raise ValueError(f"no data in step {{step}}")
    if int(os.environ["RANK"]) == 1 and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

print("starts with step", first)
"""


def script(folder: Path, faults: dict[tuple[int, int], str], inits: bool = False) -> str:
    """The recipe, with faults in it. `inits`: it calls `init_process_group` itself."""
    text = RECIPE.replace("for step in", FAULTS.format(faults=faults) + "for step in", 1)
    text = text.replace("    loss = ", "    fail(step)\n    loss = ", 1)
    if inits:
        text = text.replace("torch.manual_seed", 'torch.distributed.init_process_group("gloo")\ntorch.manual_seed', 1)
        text += "torch.distributed.destroy_process_group()\n"
    (folder / "train.py").write_text(f"import os\nos.chdir({str(folder)!r})\n{text}")
    return str(folder / "train.py")


def check_starts(output: str, *steps: int) -> None:
    """Both ranks have started in these steps, or one before, if the fault came while rank 0 was still saving."""
    found = [int(step) for step in re.findall(r"starts with step (\d+)", output)]
    assert len(found) == 2 * len(steps), output
    for step, pair in zip(steps, zip(found[::2], found[1::2], strict=True), strict=True):
        assert pair in ((step, step), (step - 1, step - 1)), output


def check_result(folder: Path, steps: int, completed: bool = True) -> None:
    """The checkpoint is that of one process that computes for both ranks, and has no faults."""
    saved = torch.load(folder / "checkpoint.pt")
    assert saved["next_step"] == steps or (not completed and saved["next_step"] == steps - 1)
    steps = saved["next_step"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * step + rank))
            ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(saved["model"][name], expected, rtol=1e-4, atol=1e-5)


def check_told(folder: Path, attempt: int, step: int) -> None:
    """The files in which torchrun looks for the cause: rank 0 only fell with rank 1, if it was not ended before."""
    (told,) = folder.glob(f"logs/*/attempt_{attempt}/1/error.json")
    cause = json.loads(told.read_text())["message"]
    assert re.search(rf"ValueError.*no data in step {step}", cause["message"]), cause
    for fell in folder.glob(f"logs/*/attempt_{attempt}/0/error.json"):
        said = json.loads(fell.read_text())["message"]
        assert "rank 0: rank 1 raised ValueError: no data" in said["message"]
        assert int(said["extraInfo"]["timestamp"]) > int(cause["extraInfo"]["timestamp"])


def test_torchrun_without_options(ranks: Ranks, tmp_path: Path) -> None:
    """It keeps one store for all starts. When none is left, it names the first cause of the last one."""
    faults = {(0, 3): "kill", (1, 6): "raise"}
    arguments = ("--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", f"--master-port={_free_port()}")
    output = run("-m", "torch.distributed.run", *arguments, "--max-restarts=1", script(tmp_path, faults))
    check_starts(output, 0, 3)
    root = output.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 ", root), output
    assert "ValueError: no data in step 6" in root, output
    check_told(tmp_path, attempt=1, step=6)
    ranks(check_result, 1, tmp_path, 6, False, backend=None)


def train(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forked, it has the agent's handler, which only raises
    exec(compile(Path(path).read_text(), path, "exec"), {"__name__": "__main__"})


def launch(folder: Path, path: str, backend: str) -> None:
    """What torchrun does, with ranks that it forks: they need not load torch."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # static has no such choice
    tempfile.tempdir = str(folder)  # torch leaves a file of a rank that was killed
    torch.optim.AdamW([torch.zeros(1)])  # loads what each rank would
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=2,
        run_id="test",
        rdzv_backend=backend,
        rdzv_endpoint=f"127.0.0.1:{_free_port()}",
        rdzv_configs={"rank": 0} if backend == "static" else {},
        local_addr="127.0.0.1",
        start_method="fork",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    elastic_launch(config, train)(path)


@FORKS_BESIDE_THREADS
@pytest.mark.parametrize(("backend", "inits"), [("static", False), ("c10d", True)])
def test_it_finishes(ranks: Ranks, tmp_path: Path, backend: str, inits: bool) -> None:
    """A store for all starts, of which gradsync makes the group; a store for each, and a script that makes its own."""
    path = script(tmp_path, {(0, 3): "raise", (1, 6): "kill"}, inits)
    (outcome,) = ranks.outcomes(launch, 1, tmp_path, path, backend, backend=None, limit=60.0)
    check_starts(outcome.output, 0, 3, 6)
    assert outcome.returned
    ranks(check_result, 1, tmp_path, 10, backend=None)
    check_told(tmp_path, attempt=0, step=3)


@on_ranks(2)
def test_a_start_that_ended_while_replicas_were_made() -> None:
    """Some ranks of it had come to make a replica more often than others, and had announced themselves."""
    left = Membership(dist.group.WORLD)  # type: ignore[arg-type]
    for _ in range(left.rank):
        left.next_number("rendezvous")
    os.environ.update(TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE="2")
    replica = make("replicate", build(), transport="shared_memory")
    backward(replica)
    same_everywhere(replica)


def test_when_keys_are_put_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    known |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    assert restarts.prefix() == "gradsync/restart/2"
    other = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_WORLD_SIZE": "2"}
    for name, value in other.items():  # the first start; a store of its own; several nodes, whose counts differ
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert restarts.prefix() == ""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def test_torchrun_on_two_nodes(ranks: Ranks, hosts: list[Host], tmp_path: Path) -> None:
    """Each node's agent counts restarts for itself: one whose ranks only fell with the others may count none."""
    port, path = _free_port(), script(tmp_path, {(0, 3): "kill"})
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    agents = []
    for number, host in enumerate(hosts):
        where = f"--rdzv-endpoint={hosts[0].address}:{port}", f"--rdzv-conf=is_host={int(number == 0)}"
        options = (
            "--nnodes=2",
            "--nproc-per-node=1",
            "--max-restarts=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=test",
            *where,
        )
        command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run", *options]
        agents.append(
            subprocess.Popen(
                [*command, f"--local-addr={host.address}", path],
                env={**environment, "GLOO_SOCKET_IFNAME": host.interface},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [agent.communicate(timeout=90 * crowding())[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    starts = [[int(step) for step in re.findall(r"starts with step (\d+)", output)] for output in said]
    assert starts[0] == starts[1], said
    assert starts[0][0] == 0, said
    assert starts[0][1] in (2, 3), said
    ranks(check_result, 1, tmp_path, 10, backend=None)
