"""Decides when each node starts, kills or restarts a replica. Events in, instructions out: no sockets, no clocks.

The fleet starts no process itself: node agents do, and report. What it must know after the coordinator was restarted
comes from the nodes, too: the hello of each lists the processes that run there. What no node knows, which is how stages
were scaled and what was drained, the coordinator keeps in a file (`core/memory.py`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import omni_actors
from omni_actors.config import PipelineConfig
from omni_actors.config.devices import node_devices
from omni_actors.coordinator.core.evidence import Evidence, evidence_of
from omni_actors.coordinator.core.instructions import (
    FleetInstruction,
    Level,
    Log,
    Measured,
    ReplicaRegistered,
    TellNode,
    TellReplica,
)
from omni_actors.coordinator.core.launch import Culprit, StartHistory, explain_end
from omni_actors.coordinator.core.memory import FleetMemory
from omni_actors.coordinator.core.nodes import HelloKind, Node, classify_hello
from omni_actors.coordinator.core.operations import Operations
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.states import LaunchEvent, NodeEvent, ReplicaEvent, ReplicaState
from omni_actors.protocol.control import (
    Fatal,
    Heartbeat,
    Hello,
    Loading,
    Ready,
    Reregister,
    Shutdown,
    StageToCoordinator,
    Welcome,
)
from omni_actors.protocol.header import PROTOCOL_VERSION, ReplicaId
from omni_actors.protocol.nodes import (
    KillReplica,
    Launched,
    NodeBeat,
    NodeHello,
    NodeLeaving,
    NodeToCoordinator,
    NodeWelcome,
    ReplicaEnded,
)
from omni_actors.protocol.telemetry import Snapshot

TICK_SECONDS = 0.05  # between two calls of `tick`
LATE_TICK_SECONDS = 1.0  # after a longer pause it is this process that had stopped
ABSENT_SECONDS = 10.0  # for a node to come back to a coordinator that was restarted
LAST_LOG_SECONDS = 1.0  # for a node to report the log of the replica that fails the launch


class Fleet(Operations):
    """The replicas and nodes of a pipeline, from the first hello to the end. Every event returns instructions.

    Args:
        replicas: filled and changed here; the request machine reads it.
        client: endpoint for clients, to announce.
        results: endpoint for the results of stages.
        new_epoch: gives the epoch of a new process. No epoch may occur twice in a run directory: a stage that outlives
            a killed launcher for a moment must not be taken for one of the next launcher's.
        began: when the launch began.
        history: of starts, for what is shown.
        now: as of all events, in seconds of one monotonic clock.
        memory: what the coordinator before this one has left, if there was one and it had changed anything.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        replicas: ReplicaTable,
        client: str,
        results: str,
        new_epoch: Callable[[], int],
        began: float,
        now: float,
        history: StartHistory | None = None,
        memory: FleetMemory | None = None,
    ) -> None:
        super().__init__(pipeline, replicas, new_epoch, began, now, history, memory)
        self._client = client
        self._results = results
        self._created = self._ticked = now
        self._early: dict[tuple[str, int], tuple[ReplicaId, Hello]] = {}  # hellos of processes before their node's
        self.dropped: collections.Counter[str] = collections.Counter()

    # -- the launch ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[FleetInstruction]:
        """Expect all replicas of the pipeline. The hellos of the nodes say which of them run already."""
        self._expect_all(now)
        return self._taken()

    def stop(self) -> None:
        """Drain a launched pipeline, end one that still starts. Idempotent."""
        if self.launch.wanted:
            self.launch.on(LaunchEvent.STOP)

    def end(self) -> None:
        """Stop supervision: from now on no replica restarts and no change is announced. Idempotent."""
        if not self.launch.ending:
            self.launch.on(LaunchEvent.END)

    def shut_down(self) -> list[FleetInstruction]:
        """End, and tell every stage process and every node to shut down."""
        self.end()
        reason = self.launch.failure or "the launcher stops"
        for replica in self.replicas:
            if replica.registered:
                self._tell(replica, Shutdown(reason=reason[:8000]))
        for node in self.nodes.present():
            self._tell_node(node, Shutdown(reason=reason, failed=bool(self.launch.failure)))
        return self._taken()

    def tick(self, now: float, in_flight: int) -> list[FleetInstruction]:
        """Notice what time brings: silence, stuck processes, restarts that are due. Call it every `TICK_SECONDS`."""
        late, self._ticked = now > self._ticked + LATE_TICK_SECONDS, now
        if late:
            self.nodes.excuse_all(now)
            self.health.excuse_all(now)
        else:
            self._give_up_nodes(now)
            self._kill_stuck(now)
            self._move_lost(now)
        self._stop_drained(now)
        self._release_drained()
        self._enforce_ends(now)
        if self.launch.wanted or (self.launch.serving and in_flight):
            self._restart_due(now)
            self._start_spread(now)
        if self.launch.starting:
            self._check_launch(now)
        return self._taken()

    def _check_launch(self, now: float) -> None:
        launch = self.launch
        if launch.culprit is not None:
            if now > launch.culprit.until:
                self._fail(explain_end(launch.culprit.replica, launch.culprit.what, ""))
            return
        overdue = launch.overdue(now)
        if overdue is not None:
            self._announce(launch.progress(now))
            launch.culprit = Culprit(overdue, "is not ready in time", now + LAST_LOG_SECONDS)
            self._kill(overdue, "", now)
        elif not launch.missing():
            launch.on(LaunchEvent.ALL_READY)
            for stage in self._pipeline.stages:  # one may have died for good meanwhile
                self._fill_places(stage.name)
            for node in self.nodes.present():
                self._tell_node(node, Launched())
            self._announce(f"ready after {launch.after(now):.1f} s, clients connect to {self._client}")
        else:
            self._instructions += launch.reports(now)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def from_node(self, rank: int, body: NodeToCoordinator, now: float) -> list[FleetInstruction]:
        """Take a message of a node's agent."""
        node = self.nodes.find(rank)
        if node is None:
            if not isinstance(body, NodeHello):
                return [TellNode(rank, Reregister())]
            node = self.nodes.join(rank, now)
        node.heard = now
        if isinstance(body, NodeHello):
            self._node_hello(node, body, now)
        elif not node.present:
            self._tell_node(node, Reregister())
        elif isinstance(body, NodeBeat):
            self._tell_node(node, NodeBeat())
        elif isinstance(body, NodeLeaving) and body.drains:
            self._drain_node(node)
        elif isinstance(body, NodeLeaving):
            self._lose_node(node, f"it leaves: {body.reason}", now)
        elif isinstance(body, ReplicaEnded):
            self.ranks.ended(body.stage, body.replica, body.spawn_epoch, rank)
            replica = self.replicas.current(body.stage, body.replica)
            if replica is not None and replica.spawn_epoch == body.spawn_epoch and replica.alive:
                where = "" if rank == replica.node else f"its ranks on node {rank}: "
                self._died(replica, f"{where}{body.how}", body.log, now, evidence_of(body.exit_code))
        return self._taken()

    def _node_hello(self, node: Node, hello: NodeHello, now: float) -> None:
        difference = self._difference(hello)
        if difference:
            text = f"Node {node.rank} is refused: {difference}."
            self._announce(text)
            self._tell_node(node, Shutdown(reason=text, failed=True))
            if self._is_needed(node):
                self._fail(text)
            self._forget_node(node)
            return
        if not node.present and not self._is_needed(node) and self.launch.serving:
            self._announce(f"node {node.rank} has joined with {node_devices(hello.devices)}")
        node.on(NodeEvent.HELLO)
        node.devices, node.ranks_addr = hello.devices, hello.ranks_addr
        if hello.launched and node.rank == 0 and self.launch.starting:
            self.launch.on(LaunchEvent.ALL_READY)  # under a coordinator before this one
        self._tell_node(node, NodeWelcome())
        if self.launch.serving:
            self._tell_node(node, Launched())
        takeover = self.nodes.take_over(node, self.ranks.listed(node.rank, hello.replicas), self.ranks.stages)
        for item in takeover.kill:
            self._tell_node(node, KillReplica(item.stage, item.replica, item.spawn_epoch))
        for item in takeover.adopt:
            self._adopt(item.stage, item.replica, item.spawn_epoch, now)
        where = f" on node {node.rank}" if len(self.nodes) > 1 else ""
        if takeover.adopt:
            names = ", ".join(f"{item.stage}/{item.replica}" for item in takeover.adopt)
            self._announce(f"{names} still running{where}")
        if takeover.start and not self.launch.ending:
            names = ", ".join(f"{stage}/{index}" for stage, index in takeover.start)
            self._announce(f"starting {names}{where}")
            for stage, index in takeover.start:
                self._start(stage, index, now)
        for replica in takeover.ended:  # last: a death restarts all that is due
            self._died(replica, "its node knows nothing of it", "", now, Evidence.KILLED)
        self._take_ranks(node, now)

    def _take_ranks(self, node: Node, now: float) -> None:
        """Decide about the spread replicas of a node that has come or come back."""
        for replica in self._with_ranks_on(node):
            if not replica.alive:
                self._kill_ranks(replica)
            elif replica.spawn_epoch:
                if self._is_torn(replica):
                    self._died(replica, f"node {node.rank} knows nothing of it", "", now, Evidence.KILLED)
            elif all(host.present for host in self._hosts(replica)):  # it may be older than this coordinator
                epoch = self.ranks.common_epoch(replica.stage, replica.index)
                if epoch is None:
                    self._kill_ranks(replica)
                else:
                    self._adopt(replica.stage, replica.index, epoch, now)
        self._start_spread(now)

    def _is_torn(self, replica: Replica) -> bool:
        """Whether a spread replica has lost one of its processes, so that the others must not go on."""
        place = replica.stage, replica.index
        known = bool(replica.spawn_epoch and self.ranks.hosts(replica.stage))
        return known and self.ranks.common_epoch(*place) != replica.spawn_epoch

    def _involving(self, node: Node) -> list[Replica]:
        """The replicas that have a process on a node."""
        whole = [replica for replica in self.nodes.on(node) if not self.ranks.hosts(replica.stage)]
        return [*whole, *self._with_ranks_on(node)]

    def _with_ranks_on(self, node: Node) -> list[Replica]:
        """Those of them that are spread over several hosts."""
        stages = [stage for stage in self.ranks.stages if node.rank in self.ranks.hosts(stage)]
        return [replica for stage in stages for replica in self.replicas.of(stage)]

    def _start_spread(self, now: float) -> None:
        """Start spread replicas that waited for a node: for the first time, or since it was away."""
        spread = [replica for stage in self.ranks.stages for replica in self.replicas.of(stage)]
        for replica in spread if not self.launch.ending else ():
            waits = replica.left_with_node if not replica.alive else not replica.spawn_epoch
            if waits and self._may_start(replica):
                hosts = ", ".join(str(host.rank) for host in self._hosts(replica))
                self._announce(f"starting {replica.name} on node {hosts}")
                self._start(replica.stage, replica.index, now)

    def _give_up_nodes(self, now: float) -> None:
        for node in self.nodes.silent(now, self._settings.heartbeat_timeout):
            self._lose_node(node, f"silent for {now - node.heard:.1f} s", now)
        if self.launch.serving and now > self._created + ABSENT_SECONDS:
            for node in self.nodes.absent():
                if any(replica.alive for replica in (*self.nodes.on(node), *self._with_ranks_on(node))):
                    self._lose_node(node, "it has not come back to the restarted coordinator", now)

    def _drain_node(self, node: Node) -> None:
        """Have the replicas of a node that stops finish what they hold. Others take new requests.

        While the whole pipeline drains they go on: what is in flight may still come to them.
        """
        if not node.stays:
            return
        node.on(NodeEvent.DRAIN)
        if not self.launch.wanted:
            return
        replicas = self._involving(node)
        held = {request for replica in replicas for request in replica.requests}
        self._announce(f"node {node.rank} stops; requests on its replicas: {len(held)}")
        for replica in replicas:
            replica.orders.drain = True
            if replica.ready:
                self._drain(replica)

    def _release_drained(self) -> None:
        """Let nodes end whose replicas have finished. If the whole pipeline drains, they end with it."""
        for node in self.nodes.draining() if self.launch.wanted else ():
            if not any(replica.requests for replica in self._involving(node)):
                node.on(NodeEvent.RELEASED)
                self._tell_node(node, Shutdown(reason="its requests are finished"))

    def _lose_node(self, node: Node, why: str, now: float) -> None:
        """Count the replicas of a node as dead until it is back or they have moved."""
        node.on(NodeEvent.LOST)
        node.away_since = now
        away = f"node {node.rank} is away: {why}"
        self._announce(away)
        self.ranks.forget(node.rank)
        for replica in self._involving(node):
            if replica.alive or replica.state is ReplicaState.WAITING:
                replica.orders.clear_kill()
                replica.left_with_node = True
                self._log(Level.ERROR, f"lost: {away}", replica)
                self._lose(replica, away, restart=False)
                self._kill_ranks(replica)
                if replica.leaving:
                    self._forget(replica)
        if self._is_needed(node):
            self._fail(f"Node {node.rank} was lost while the pipeline started: {why}")
        self._forget_node(node)

    # -- stage processes ----------------------------------------------------------------------------------------------

    def from_stage(self, replica_id: ReplicaId, body: StageToCoordinator, now: float) -> list[FleetInstruction]:
        """Take a message on the control connection of a stage process."""
        kind = str(type(body).__struct_config__.tag)
        replica = self.replicas.at(replica_id)
        if isinstance(body, Hello):
            self._hello(replica_id, body, now)
        elif replica is None or not replica.alive:
            self._drop_unknown(replica_id, kind)
            if isinstance(body, Heartbeat) and self.replicas.current(replica_id.stage, replica_id.replica) is not None:
                # It does not know that it counts as lost.
                self._instructions.append(TellReplica(replica_id, Reregister()))
        elif replica.state is ReplicaState.STARTING:  # this is about a registration that is over
            self._tell(replica, Reregister())
        elif isinstance(body, Ready) and replica.state is not ReplicaState.LOADING:
            self._drop_disorder(replica, kind)
        else:
            self._from_registered(replica, body, now)
        return self._taken()

    def link_cut(self, replica_id: ReplicaId) -> list[FleetInstruction]:
        """Ask a stage process whose link was cut to register again."""
        text = f"the link to {replica_id.name} was cut; the stage should register again"
        return [Log(Level.WARNING, text), TellReplica(replica_id, Reregister())]

    def _expect(self, stage: str, index: int, spawn_epoch: int, now: float) -> Replica:
        replica = super()._expect(stage, index, spawn_epoch, now)
        early = self._early.pop((stage, index), None) if spawn_epoch else None
        if early is not None:
            self._hello(*early, now)
        return replica

    def _hello(self, replica_id: ReplicaId, hello: Hello, now: float) -> None:
        """Register a process, for the first time or again."""
        place = replica_id.stage, replica_id.replica
        current = self.replicas.current(*place)
        kind = classify_hello(current, replica_id.epoch, hello.spawn_epoch or replica_id.epoch)
        if current is None or kind is HelloKind.FOREIGN or self._is_torn(current):
            self._drop_unknown(replica_id, "hello")
            self._instructions.append(TellReplica(replica_id, Shutdown("the pipeline does not need this process")))
        elif kind is HelloKind.EARLY:
            self._early[place] = replica_id, hello
        elif kind is HelloKind.REPEATED:
            self._drop_disorder(current, "hello")
        elif kind is HelloKind.RENEWED:
            if current.registered:
                self._lose(current, "it has registered again", restart=True)
            renewed = self.replicas.add(*place, replica_id.epoch, current.spawn_epoch, current.node, current.slot)
            renewed.phase = "registering again"
            self.health.spawned(renewed, now)
            self._welcome(renewed, hello)
        else:
            self._welcome(current, hello)

    def _welcome(self, replica: Replica, hello: Hello) -> None:
        difference = self._difference(hello)
        if difference:
            replica.last_words = f"{replica.name}: {difference}."
            self._tell(replica, Shutdown(reason=difference))
            return
        replica.on(ReplicaEvent.HELLO)
        replica.pid, replica.inbox, replica.remote, replica.arena = hello.pid, hello.inbox, hello.remote, hello.arena
        self._instructions.append(ReplicaRegistered(replica))
        self._tell(replica, Welcome(results=self._results))
        self._announce_peers()

    def _difference(self, hello: Hello | NodeHello) -> str:
        """What keeps a process from working with this one, "" for nothing."""
        ours = (PROTOCOL_VERSION, omni_actors.__version__, self._pipeline.digest())
        theirs = (hello.protocol, hello.package, hello.config)
        return "" if ours == theirs else f"protocol, package and configuration are {theirs} there and {ours} here"

    def _from_registered(self, replica: Replica, body: StageToCoordinator, now: float) -> None:
        if isinstance(body, Heartbeat):
            self.health.beat(replica, body.progress, now)
            replica.counts = body.counts
            self._instructions.append(Measured(replica, body))
        elif isinstance(body, Snapshot):
            self._instructions.append(Measured(replica, body))
        elif isinstance(body, Loading):
            replica.phase = body.phase
        elif isinstance(body, Fatal):
            replica.last_words = body.message
        elif isinstance(body, Ready):
            self._on_ready(replica, body, now)

    def _on_ready(self, replica: Replica, facts: Ready, now: float) -> None:
        self.health.ready(replica, now)
        replica.become_ready(facts)
        if replica.orders.drain:  # given before it registered again
            self._drain(replica)
        else:
            self._announce(f"{replica.name} ready in {facts.seconds:.1f} s")
        self._ready_again(replica)
        if self.launch.starting:
            self._check_launch(now)

    # -- instructions -------------------------------------------------------------------------------------------------

    def _drop_unknown(self, replica_id: ReplicaId, kind: str) -> None:
        self.dropped["control_of_unknown_replica"] += 1
        text = f"dropped a {kind} of the unknown replica {replica_id.name} (epoch {replica_id.epoch})"
        self._instructions.append(Log(Level.WARNING, text))

    def _drop_disorder(self, replica: Replica, kind: str) -> None:
        self.dropped["control_out_of_order"] += 1
        self._log(Level.WARNING, f"said {kind} while {replica.state}", replica)
