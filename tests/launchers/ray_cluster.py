"""A Ray cluster of this machine, as a program: a line of its input adds a node or kills one.

python ray_cluster.py --> prints its address     "add CPUS" --> a node     "kill" --> the last
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

LOST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}
STORE = 80_000_000
AGENTS = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port")


def describe_node(number: int, num_cpus: int, memory: int) -> dict[str, Any]:
    """Its agents have ports that are known: for others it waits half a minute at most."""
    ports = {name: 18000 + 10 * number + place for place, name in enumerate(AGENTS)}
    return {"num_cpus": num_cpus, "memory": memory, "object_store_memory": STORE, **ports}


def main() -> None:
    # Room for the trainer only: it requests memory, and no other process fits next to it.
    head = describe_node(0, 2, 4_000_000_000)
    head |= {"include_dashboard": False, "_system_config": LOST}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print(cluster.address, flush=True)
    nodes: list[Any] = []
    for number, line in enumerate(sys.stdin, 1):
        what, *numbers = line.split()
        if what == "add":
            node = describe_node(number, int(numbers[0]), 500_000_000)
            nodes.append(cluster.add_node(**node))
        else:
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        print(what, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
