"""vLLM and published weights: a transfer engine for its workers, and one for the trainer.

    llm = LLM(model, weight_transfer_config=WeightTransferConfig(backend="shardwise"))

    weights = shardwise.publish(model, "policy")
    info = PublisherInitInfo(weights, "policy", rank=dist.get_rank())
    engine = WeightTransferTrainerFactory.trainer_init(info, client=OfflineClient(llm))
    engine.send_weights()                                       # after every step

Workers read what the trainer publishes, in memory of the host or from a folder: nothing is sent.
The backend is there wherever Shardwise is installed, for every process of vLLM loads its plugins.

Source: ``vllm/distributed/weight_transfer/base.py`` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer import base, factory
from vllm.model_executor.model_loader import reload

from shardwise.base.errors import CheckpointError
from shardwise.weights.publish import Publication
from shardwise.weights.subscribe import Subscription, subscribe

BACKEND = "shardwise"


def register() -> None:
    """Make the backend known to vLLM in this process. vLLM calls it, as an entry point."""
    factory.WeightTransferEngineFactory.register_engine(BACKEND, PublishedWeightsEngine)
    factory.WeightTransferTrainerFactory.register_engine(BACKEND, PublishingEngine)


@dataclass
class ReaderInitInfo(base.WeightTransferInitInfo):
    """What workers subscribe to.

    Attributes:
        name: what the weights are published as.
        at: the folder that they are published to; ``None`` for memory of the host.
    """

    name: str
    at: str | None = None


@dataclass
class ReaderUpdateInfo(base.WeightTransferUpdateInfo):
    """What workers are to read.

    Attributes:
        version: the number of the version, at least.
    """

    version: int


class PublishedWeightsEngine(base.WeightTransferEngine[ReaderInitInfo, ReaderUpdateInfo]):
    """A worker's side: it reads published weights into its model."""

    init_info_cls = ReaderInitInfo
    update_info_cls = ReaderUpdateInfo
    _subscription: Subscription | None = None

    def init_transfer_engine(self, init_info: ReaderInitInfo) -> None:
        """Subscribe."""
        self._subscription = subscribe(init_info.name, at=init_info.at)

    def start_weight_update(self) -> None:
        """Have vLLM take weights as they are in files."""
        reload.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReaderUpdateInfo) -> None:
        """Read the newest version.

        Raises:
            CheckpointError: it is older than the trainer says.
        """
        if self._subscription is None:
            raise CheckpointError("found no name to subscribe to, expected init_transfer_engine")
        self.model.load_weights(iter(self._subscription))
        if self._subscription.version < update_info.version:
            raise CheckpointError(
                f"found version {self._subscription.version}, expected version "
                f"{update_info.version}, which the trainer has published; do workers see the same "
                "folder, or the same host?"
            )

    def finish_weight_update(self) -> None:
        """Have vLLM bring the weights into the form in which it computes."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Read no more."""
        self._subscription = None


@dataclass
class PublisherInitInfo(base.TrainerInitInfo):
    """What the trainer publishes, and where.

    Attributes:
        publication: what publishes the weights.
        name: what they are published as.
        at: the folder that they are published to; ``None`` for memory of the host.
    """

    backend: ClassVar[str] = BACKEND

    publication: Publication
    name: str
    at: str | None = None


class PublishingEngine(base.TrainerWeightTransferEngine[PublisherInitInfo]):
    """The trainer's side: it publishes a version, and tells workers to read it."""

    init_info_cls = PublisherInitInfo
    _publication: Publication

    @classmethod
    def trainer_init(
        cls, init_info: PublisherInitInfo, *, client: Any, source: base.WeightSource | None = None
    ) -> Self:
        """Tell workers what to subscribe to. Every rank of the trainer calls this.

        Raises:
            ValueError: there is a ``source``: what is published is the model of the publication.
        """
        if source is not None:
            raise ValueError(f"source: found {source}, expected None; publish the model")
        engine = cls(client=client, is_sender=init_info.is_sender)
        engine._publication = init_info.publication
        if engine.is_sender:
            client.init_weight_transfer_engine({"name": init_info.name, "at": init_info.at})
        return engine

    def send_weights(self) -> None:
        """Publish a version, and have workers read it. Every rank of the trainer calls this."""
        version = self._publication.update()
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(weight_version=str(version))


class OfflineClient:
    """What tells an ``LLM`` of this process to read. vLLM has such clients for its servers.

    Args:
        llm: the ``vllm.LLM``.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have its workers subscribe."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Have it take weights as they are in files."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have its workers read."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have it compute with what has been read."""
        del weight_version
        self._llm.finish_weight_update()


class PublishedSource(base.WeightSource):
    """Published weights as a source for vLLM's own engines, such as NCCL.

    Args:
        subscription: the weights.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def metadata(self) -> list[base.ParamMeta]:
        """Name, dtype and shape of every tensor, in the order of iteration."""
        return [
            base.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._subscription
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._subscription)
