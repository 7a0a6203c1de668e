"""Needs Ray (extra `ray`), and starts a cluster of two nodes on this machine: half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.measure.tokens.files import write_run
from verl_audit.measure.tokens import TokenSums, reduce_all, shards

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    made.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_two_nodes_one_lost_on_the_way_give_the_bits_of_one_thread(cluster: Any, tmp_path: Path) -> None:
    paths = write_run(tmp_path, 12)
    alone = reduce_all(paths, kernel="numpy", workers=1).sums
    running = shards(paths, kernel="numpy", engine="ray", workers=2)
    found = [next(running), next(running)]
    cluster.remove_node(min(cluster.worker_nodes, key=str), allow_graceful=False)
    found += list(running)
    assert all(isinstance(shard, TokenSums) for shard in found)
    assert [list(shard.trajectories) for shard in found if isinstance(shard, TokenSums)] == [[path] for path in paths]
    again = reduce_all(paths, kernel="numpy", engine="ray").sums
    assert all(again.tables()[name].equals(table) for name, table in alone.tables().items())
    assert again.trajectories == alone.trajectories
