"""Private names of torch's elastic agent, which leaves methods with such names to subclasses."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class LocalAgent(LocalElasticAgent):
    """Torch's agent of the ranks of one host, with public names for what a subclass may change."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes of a world; return their ids by local rank."""
        return dict(super()._start_workers(worker_group))

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the processes, before others are started in their place."""
        super()._stop_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the processes once."""
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def before_shutdown(self) -> None:
        """Do what has to be done before the agent ends whatever still runs."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.12 added an argument
        self.before_shutdown()
        super()._shutdown(*args, **kwargs)
