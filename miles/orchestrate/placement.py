"""Where every trainer rank and engine of a run lives: node, device and bundle of Ray's placement group.

Pure: a recipe and what is known of the cluster in, a `Placement` or a refusal with the numbers out. Nothing else
decides on devices. Ranks come node by node, so that pipelines and data parallelism cross nodes and tensor parallelism
does not; engines take what is left (disaggregated) or share the first ranks' devices (colocated).
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles.orchestrate.errors import PlacementError
from miles.recipe import Recipe
from miles.train.config import ParallelConfig

Kind = Literal["cpu", "cuda"]
LOOPBACK = "127.0.0.1"
UNITS: dict[Kind, str] = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True)
class NodeFacts:
    """One machine (or raylet): what is free on it for this run. `cpus` counts processes that may be started."""

    id: str
    address: str
    cpus: int
    gpus: int
    # What the node reports for people; 0 where nobody was asked.
    memory_bytes: int = 0


@dataclass(frozen=True)
class ClusterFacts:
    """What a run may use. `driver`: id of the node that the command runs on."""

    nodes: tuple[NodeFacts, ...]
    driver: str

    def node(self, node_id: str) -> NodeFacts:
        return next(node for node in self.nodes if node.id == node_id)


@dataclass(frozen=True)
class Device:
    """One place for a rank, an engine, or in colocated mode both. `index` counts this run's devices of a node from 0;
    `bundle` is the number of its bundle: a bundle is one device."""

    node: str
    kind: Kind
    index: int
    bundle: int


@dataclass(frozen=True)
class ResourceBundle:
    """What Ray reserves for one device: CPUs for its processes, and its GPU."""

    node: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Placement:
    """Devices by rank and by engine. `bundles[device.bundle]` is what Ray reserves for a device."""

    cluster: ClusterFacts
    trainer_devices: tuple[Device, ...]
    engine_devices: tuple[Device, ...]
    bundles: tuple[ResourceBundle, ...]

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """Nodes that have a rank or an engine, in the order of their bundles."""
        return tuple(self.cluster.node(node) for node in dict.fromkeys(bundle.node for bundle in self.bundles))

    @property
    def leaves_the_driver(self) -> bool:
        """A rank or engine lives on another node than the driver."""
        return any(bundle.node != self.cluster.driver for bundle in self.bundles)

    @property
    def meeting_address(self) -> str:
        """Where the ranks' mesh meets: loopback while all of them are on one node, else the address of rank 0's."""
        nodes = {device.node for device in self.trainer_devices}
        return LOOPBACK if len(nodes) == 1 else self.cluster.node(self.trainer_devices[0].node).address

    def engine_host(self, index: int, configured: str) -> str:
        """Where engine `index` listens: `engine.host` on the driver's node alone, else its node's own address."""
        return self.cluster.node(self.engine_devices[index].node).address if self.leaves_the_driver else configured

    def gpu_share(self, device: Device) -> float:
        """The part of a GPU that one process of a device asks Ray for."""
        held = sum(other == device for other in (*self.trainer_devices, *self.engine_devices))
        return self.bundles[device.bundle].gpus / held

    def describe(self) -> Iterator[tuple[str, str]]:
        """(process, where it lives) for each rank and engine, for people."""
        for role, devices in (("trainer rank", self.trainer_devices), ("engine", self.engine_devices)):
            for number, device in enumerate(devices):
                shared = (
                    " (shared)" if sum(o == device for o in (*self.trainer_devices, *self.engine_devices)) > 1 else ""
                )
                where = f"{self.cluster.node(device.node).address} {device.kind}:{device.index}{shared}"
                yield f"{role} {number}", where


def place(recipe: Recipe, cluster: ClusterFacts, *, engines: bool = True) -> Placement:
    """The one placement of this recipe on this cluster. `PlacementError` says what is needed and what there is.

    `engines=False`, and a recipe whose answers come from the data: the trainer ranks alone.
    """
    engines = engines and not recipe.supervised
    plan, rooms = _Plan.of(recipe, cluster, engines=recipe.engine.count if engines else 0), _rooms(cluster)
    if plan.colocated:
        trainers = _seat_trainers(plan, rooms, engines_on_first=plan.engines)
        servers = trainers[: plan.engines]
    elif plan.engine_kind == "cuda" and plan.trainer_kind == "cpu":
        # The scarcer device first: ranks on CPUs must not take the last process of a node with a GPU.
        servers = _seat_engines(plan, rooms)
        trainers = _seat_trainers(plan, rooms)
    else:
        trainers = _seat_trainers(plan, rooms)
        servers = _seat_engines(plan, rooms)
    seats = list(dict.fromkeys((*trainers, *servers)))
    devices = {seat: Device(seat.node, seat.kind, seat.index, bundle) for bundle, seat in enumerate(seats)}
    placement = Placement(
        cluster=cluster,
        trainer_devices=tuple(devices[seat] for seat in trainers),
        engine_devices=tuple(devices[seat] for seat in servers),
        bundles=tuple(ResourceBundle(seat.node, seat.cpus, int(seat.kind == "cuda")) for seat in seats),
    )
    if placement.leaves_the_driver and engines and not _is_loopback(recipe.engine.host):
        raise PlacementError(
            f"engine.host {recipe.engine.host} is one address, but the run leaves the node of the command; remove it, and "
            "every engine listens on its node's own"
        )
    return placement


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tensor_group(parallel: ParallelConfig) -> int:
    """How many consecutive ranks exchange activations in every layer and so belong on one node."""
    return math.lcm(parallel.tp, parallel.expert_tp)


@dataclass(frozen=True)
class _Plan:
    """What the recipe asks for, checked for itself, and words for a refusal."""

    world: int
    group: int
    engines: int
    trainer_kind: Kind
    engine_kind: Kind
    colocated: bool
    cluster: ClusterFacts

    @classmethod
    def of(cls, recipe: Recipe, cluster: ClusterFacts, *, engines: int) -> _Plan:
        wanted = recipe.train.device
        if wanted == "auto":
            wanted = "cuda" if any(node.gpus for node in cluster.nodes) else "cpu"
        engine: Kind = "cpu" if recipe.engine.device == "cpu" else "cuda"
        parallel, colocated = recipe.train.parallel, recipe.placement.mode == "colocated"
        plan = cls(parallel.world_size, tensor_group(parallel), engines, wanted, engine, colocated, cluster)
        if colocated and engines and engine != wanted:
            raise PlacementError(
                f"placement.mode colocated shares devices, but trainers are on {wanted} (train.device "
                f"{recipe.train.device}) and engines on {engine} (engine.device {recipe.engine.device}); set both to the "
                "same, or use placement.mode=disaggregated"
            )
        if colocated and plan.engines > plan.world:
            raise PlacementError(
                f"placement.mode colocated gives each engine the device of one trainer rank, but there are {plan.engines} "
                f"engines (engine.count) and {plan.world} ranks; lower engine.count to {plan.world}, or use "
                "placement.mode=disaggregated"
            )
        return plan

    @property
    def gpus(self) -> tuple[int, int]:
        """(for trainers, for engines beside them)."""
        engines = self.engines if self.engine_kind == "cuda" and not self.colocated else 0
        return self.world if self.trainer_kind == "cuda" else 0, engines

    def refusal(self, *, seated: int) -> PlacementError:
        """`seated`: trainer ranks that found room, in whole groups."""
        wanted: tuple[tuple[Kind, tuple[int, int]], ...] = (("cuda", self.gpus), ("cpu", (self.world, self.engines)))
        for kind, (trainers, engines) in wanted:
            have = sum(_count(node, kind) for node in self.cluster.nodes)
            if trainers + engines > have:
                return self._too_few(kind, trainers, engines, have)
        if seated < self.world:
            return PlacementError(
                f"placement: tensor-parallel groups of {self.group} ranks stay on one node, and {self.world // self.group} "
                f"groups are needed, but only {seated // self.group} find room ({self._there()}); lower train.parallel.tp "
                "or etp, or use nodes with more devices"
            )
        return PlacementError(
            f"placement: there is no process and device on one node for each of {_many(self.engines, 'engine')} "
            f"(engine.count) beside {_many(self.world, 'trainer rank')} ({self._there()}); lower engine.count, or use nodes with more CPUs"
        )

    def _too_few(self, kind: Kind, trainers: int, engines: int, have: int) -> PlacementError:
        unit = UNITS[kind]
        ways = ["lower train.parallel" if trainers > 1 else "", "lower engine.count" if self.engines > 1 else ""]
        if kind == "cuda":
            ways += ["use placement.mode=colocated" if engines and trainers else ""]
            ways += [
                f"set {key}=cpu" for key, count in (("train.device", trainers), ("engine.device", engines)) if count
            ]
        ways.append("use a cluster with more nodes (cluster.address)")
        return PlacementError(
            f"placement: needs {_many(trainers, unit)} for {_many(self.world, 'trainer rank')} + {engines} for "
            f"{_many(self.engines, 'engine')} = {trainers + engines}, but {_many(len(self.cluster.nodes), 'node')} "
            f"{'has' if len(self.cluster.nodes) == 1 else 'have'} {have} free ({self._there()}); {', '.join(filter(None, ways[:-1]))}{' or ' if any(ways[:-1]) else ''}{ways[-1]}"
        )

    def _there(self) -> str:
        shown = [f"{node.address}: {node.cpus} CPUs, {node.gpus} GPUs" for node in _ordered(self.cluster)]
        return "; ".join(shown[:8]) + (f"; {len(shown) - 8} more" if len(shown) > 8 else "")


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


@dataclass
class _Room:
    """What is left of a node while seats are given out."""

    node: NodeFacts
    cpus: int
    gpus: int
    used: dict[Kind, int] = field(default_factory=lambda: {"cpu": 0, "cuda": 0})

    def fits(self, kind: Kind, *, cpus: int, devices: int) -> bool:
        return self.cpus >= cpus and (kind == "cpu" or self.gpus >= devices)

    def take(self, kind: Kind, cpus: int) -> _Seat:
        index = self.used[kind]
        self.used[kind] += 1
        self.cpus -= cpus
        self.gpus -= kind == "cuda"
        return _Seat(self.node.id, kind, index, cpus)


@dataclass(frozen=True)
class _Seat:
    """A device that was given out; node, kind and index tell it from every other."""

    node: str
    kind: Kind
    index: int
    cpus: int


def _ordered(cluster: ClusterFacts) -> list[NodeFacts]:
    """The driver's node first, then by address: the same facts in any order give the same placement."""
    return sorted(cluster.nodes, key=lambda node: (node.id != cluster.driver, _address_order(node.address), node.id))


def _address_order(address: str) -> tuple[int, int, str]:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 9, 0, address
    return parsed.version, int(parsed), address


def _rooms(cluster: ClusterFacts) -> list[_Room]:
    return [_Room(node, node.cpus, node.gpus) for node in _ordered(cluster)]


def _count(node: NodeFacts, kind: Kind) -> int:
    return node.gpus if kind == "cuda" else node.cpus


def _seat_trainers(plan: _Plan, rooms: Sequence[_Room], *, engines_on_first: int = 0) -> list[_Seat]:
    """Seats by rank: a whole tensor-parallel group at a time, on the first node that has room."""
    seats: list[_Seat] = []
    for start in range(0, plan.world, plan.group):
        cpus = [1 + (rank < engines_on_first) for rank in range(start, start + plan.group)]
        room = next((r for r in rooms if r.fits(plan.trainer_kind, cpus=sum(cpus), devices=plan.group)), None)
        if room is None:
            raise plan.refusal(seated=start)
        seats += [room.take(plan.trainer_kind, needed) for needed in cpus]
    return seats


def _seat_engines(plan: _Plan, rooms: Sequence[_Room]) -> list[_Seat]:
    seats: list[_Seat] = []
    for _ in range(plan.engines):
        room = next((r for r in rooms if r.fits(plan.engine_kind, cpus=1, devices=1)), None)
        if room is None:
            raise plan.refusal(seated=plan.world)
        seats.append(room.take(plan.engine_kind, 1))
    return seats
