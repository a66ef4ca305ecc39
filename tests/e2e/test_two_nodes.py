"""Runs on a Ray cluster that is there already, over two nodes: the same curve, lost nodes, and the cluster afterwards.

The nodes are two of Ray's daemons on this machine, so that everything but the wire between machines is real.
"""

from __future__ import annotations

import psutil
import pytest
from raylets import Raylets, raylets
from waiting import wait_until

from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=300, suite="stage-b-cpu", timeout=1200)

STEPS = ("run.steps=20", "run.checkpoint_every=5", "eval.sets=[]", "expect={}")
LOST_WITHIN_S = 60.0


def joined(runs, cluster: Raylets, name: str, *sets: str, **options):
    return runs.run(
        name, *STEPS, f"cluster.address={cluster.address}", *sets, environment=cluster.environment, **options
    )


def actors(cluster: Raylets, number: int) -> list[str]:
    """Names of the run's processes on a node."""
    found = []
    for process in cluster.processes(number):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found += [name for name in ("TrainWorker", "EngineActor", "engines.embedded") if name in words]
    return sorted(set(found))


@pytest.mark.timeout(600)
def test_two_nodes_give_the_curve_of_one_and_the_cluster_is_left_as_it_was(runs, reference) -> None:
    with raylets([1, 2]) as cluster:
        apart = joined(runs, cluster, "apart")
        assert apart.returncode == 0, apart.stderr
        assert runs.curve("apart") == reference.curve, "the trainer on one node, the engine on the other"
        alone = runs.run("alone", *STEPS, "train.parallel.dp=2")
        assert alone.returncode == 0, alone.stderr
        spread = joined(runs, cluster, "spread", "train.parallel.dp=2", "sync.transport=broadcast")
        assert spread.returncode == 0, spread.stderr
        assert runs.curve("spread") == runs.curve("alone"), "a rank on each node, weights over the network"
        for number in range(2):
            wait_until(
                lambda n=number: not actors(cluster, n), f"the run's processes to end: {actors(cluster, number)}"
            )
            assert any("raylet" in process.name() for process in cluster.processes(number)), "the node is still there"
        small = joined(runs, cluster, "small", "train.parallel.dp=4")
        assert small.returncode == 2
        assert "needs 4 CPUs for 4 trainer ranks + 1 for 1 engine = 5, but 2 nodes have 3 free" in small.stderr
        where = runs.run(
            "where", *STEPS, "train.parallel.dp=2", environment={**cluster.environment, "RAY_ADDRESS": cluster.address},
            dry_run=True,
        )  # fmt: skip
        assert where.returncode == 0, where.stderr
        first, second = cluster.addresses
        said = " ".join(where.stdout.replace("│", " ").split())
        for line in (f"trainer rank 0 {first} cpu:0", f"trainer rank 1 {second} cpu:0", f"engine 0 {second} cpu:1"):
            assert line in said


@pytest.mark.timeout(600)
def test_a_lost_node_is_named_and_the_run_goes_on_where_there_is_room(runs, reference) -> None:
    """Three nodes with room for one process each: the trainer on the first, the engine on the second, then the third."""
    with raylets([1, 1, 1]) as cluster:
        sets = (*STEPS, f"cluster.address={cluster.address}")
        for number, step in ((1, 6), (2, 11)):
            process = runs.start("lost", *sets, environment=cluster.environment)
            runs.wait_for_step("lost", step, process)
            cluster.kill(number)
            out, err = process.communicate(timeout=LOST_WITHIN_S)
            assert process.returncode == 1, out + err
            assert f"error: lost node {cluster.addresses[number]} (" in err
            assert " with engine 0; what was saved is kept: run the same command again to resume" in err
        assert "resuming after step 5" in out, "on the third node"
        refused = runs.run("lost", *sets, environment=cluster.environment)
        assert refused.returncode == 2
        assert "needs 1 CPU for 1 trainer rank + 1 for 1 engine = 2, but 1 node has 1 free" in refused.stderr
        cluster.start(1)
        resumed = runs.run("lost", *sets, environment=cluster.environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 10" in resumed.stdout
    assert runs.curve("lost") == reference.curve


@pytest.mark.timeout(600)
def test_a_lost_trainer_is_told_as_a_lost_node_and_a_killed_command_leaves_nothing(runs) -> None:
    with raylets([1, 2]) as cluster:
        sets = (*STEPS, "run.steps=4000", "train.parallel.dp=2", f"cluster.address={cluster.address}")
        killed = runs.start("killed", *sets, environment=cluster.environment)
        runs.wait_for_step("killed", 1, killed)
        assert actors(cluster, 0) == ["TrainWorker"]
        assert actors(cluster, 1) == ["EngineActor", "TrainWorker", "engines.embedded"]
        killed.kill()
        killed.communicate()
        wait_until(lambda: not actors(cluster, 0) + actors(cluster, 1), "the run's processes to end")
        process = runs.start("lost", *sets, environment=cluster.environment)
        runs.wait_for_step("lost", 1, process)
        cluster.kill(1)
        _, err = process.communicate(timeout=LOST_WITHIN_S)
    assert process.returncode == 1, err
    assert f"error: lost node {cluster.addresses[1]} (" in err
    assert " with trainer rank 1 and engine 0; what was saved" in err
