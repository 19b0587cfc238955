"""Decides when each node starts, kills or restarts a replica. Events in, instructions out: no sockets, no clocks.

The fleet starts no process itself: node agents do, and report. What it must know after the coordinator was restarted
comes from the nodes, too: the hello of each lists the processes that run there. What no node knows, which is how stages
were scaled and what was drained, the coordinator keeps in a file. The commands of operators are in
`core/operations.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass

import omni_actors
from omni_actors.config import PipelineConfig, placement
from omni_actors.coordinator.core import hosts
from omni_actors.coordinator.core.instructions import (
    DEBUG,
    ERROR,
    WARNING,
    Announce,
    GiveUp,
    Instructions,
    Log,
    Measured,
    Remember,
    RememberedReplica,
    ReplicaHolds,
    ReplicaLost,
    ReplicaReady,
    ReplicaRegistered,
    ServeClients,
    TellNode,
    TellReplica,
    as_configured,
)
from omni_actors.coordinator.core.nodes import Culprit, Launch, Node, explain_end, plan_restart, why_stuck
from omni_actors.coordinator.core.replicas import Evidence, NodeState, Replica, ReplicaState, ReplicaTable, Seat
from omni_actors.coordinator.core.routing import StageGraph
from omni_actors.protocol.fields import PROTOCOL_VERSION, ControlPeer, ReplicaId
from omni_actors.protocol.messages import (
    Fatal,
    Heartbeat,
    Hello,
    KillReplica,
    Launched,
    Loading,
    NodeHello,
    Peers,
    Ready,
    Reregister,
    Shutdown,
    Snapshot,
    StageToCoordinator,
    StartReplica,
    Welcome,
)

TICK_SECONDS = 0.05  # between two calls of `tick`
LATE_TICK_SECONDS = 1.0  # after a longer pause it is this process that had stopped
RESTORE_SECONDS = 3.0  # for what runs to register with a coordinator that was restarted, before it serves clients
LAST_LOG_SECONDS = 1.0  # for a node to report the log of the replica that fails the launch
STOP_SECONDS = 4.0  # that one stage may take to stop before it is killed
KILL_SECONDS = 2.0  # for a node to report the end of a process that it had to kill


@dataclass(eq=False)
class Fleet:
    """The replicas and nodes of a pipeline, from the first hello to the end. Every event returns instructions.

    Args:
        replicas: filled and changed here; the request machine reads it.
        client: endpoint for clients, to announce.
        results: endpoint for the results of stages.
        new_epoch: gives the epoch of a new process. No epoch may occur twice in a run directory: a stage that outlives
            a killed launcher for a moment must not be taken for one of the next launcher's.
        began: when the launch began.
        started: when the launcher's process started, for the times that are shown.
        now: as of all events, in seconds of one monotonic clock.
        memory: what the coordinator before this one has left; nothing if there was none, or it had changed nothing.
    """

    pipeline: PipelineConfig
    replicas: ReplicaTable
    client: str
    results: str
    new_epoch: Callable[[], int]
    began: InitVar[float]
    now: InitVar[float]
    started: InitVar[float]
    memory: InitVar[Sequence[RememberedReplica]] = ()

    def __post_init__(self, began: float, now: float, started: float, memory: Sequence[RememberedReplica]) -> None:
        self.settings = self.pipeline.coordinator
        self._graph = StageGraph(self.pipeline)
        remembered = memory or as_configured(self.pipeline)
        self._remembered = {(item.stage, item.index): item for item in remembered}  # until their processes are found
        self.created = self._ticked = self.next_move = now
        self.restoring = True  # processes of the coordinator before may still register, each on its own
        self._awaited: set[ReplicaId] = set()  # those that run, as their nodes say
        self._early: dict[tuple[str, int], tuple[ReplicaId, Hello]] = {}  # hellos of processes before their node's
        ranks = sorted({item.node for item in remembered} | {*placement.ranks(self.pipeline)})
        self.nodes = {rank: Node(rank, heard=now) for rank in ranks}
        self.launch = Launch(self.replicas, self.nodes, self.pipeline, began, now, started)
        self.dropped: collections.Counter[str] = collections.Counter()

    # -- the launch ---------------------------------------------------------------------------------------------------

    def start(self, now: float) -> Instructions:
        """Expect all replicas of the pipeline. The hellos of the nodes say which of them run already."""
        done: Instructions = []
        for item in self._remembered.values():
            replica, expected = self._expect(item.stage, item.index, Seat(item.node, item.slot), 0, now)
            replica.spare, replica.joining = item.spare, item.joining
            replica.phase = f"waiting for node {replica.node}"
            done += expected
        return done

    def stop(self) -> None:
        """Drain a launched pipeline, end one that still starts. Idempotent."""
        if self.launch.wanted:
            self.launch.on("stop")

    def end(self) -> None:
        """Stop supervision: from now on no replica restarts and no change is announced. Idempotent."""
        if not self.launch.ending:
            self.launch.on("end")

    def shut_down(self) -> Instructions:
        """End, and tell every stage process and every node to shut down."""
        self.end()
        reason = self.launch.failure or "the launcher stops"
        to_stages = Shutdown(reason=reason[:8000])
        to_nodes = Shutdown(reason=reason, failed=bool(self.launch.failure))
        return [
            *(TellReplica(replica.replica_id, to_stages) for replica in self.replicas if replica.registered),
            *(TellNode(rank, to_nodes) for rank, node in self.nodes.items() if node.present),
        ]

    def tick(self, now: float, in_flight: int) -> Instructions:
        """Notice what time brings: silence, stuck processes, restarts that are due. Call it every `TICK_SECONDS`."""
        late, self._ticked = now > self._ticked + LATE_TICK_SECONDS, now
        done: Instructions = []
        if late:
            for heard in (*self.nodes.values(), *self.replicas):  # what came meanwhile is unread
                heard.heard = now
            for replica in self.replicas:
                replica.moved = now
        else:
            done += hosts.give_up_nodes(self, now)
            done += self._kill_stuck(now)
            done += hosts.move_lost(self, now)
        done += self.restored(now)
        done += self.stop_drained(now)
        done += hosts.release_drained(self)
        done += self._enforce_ends(now)
        if self.launch.wanted or (self.launch.serving and in_flight):
            done += self.restart_due(now)
        if self.launch.starting:
            done += self._check_launch(now)
        return done

    def restored(self, now: float) -> Instructions:
        """Serve clients once everything is here that the coordinator before had, or does not come.

        Until then stages hear of no peers: a stage closes its link to those that are not among them.
        """
        if not self.restoring or not self.nodes[0].present:
            return []
        absent = self.launch.serving and any(node.state is NodeState.EXPECTED for node in self.nodes.values())
        if (self._awaited or absent) and now < self.created + RESTORE_SECONDS:
            return []
        self.restoring = False
        self._awaited.clear()
        return [*self._announce_peers(), ServeClients()]

    def _check_launch(self, now: float) -> Instructions:
        launch = self.launch
        if launch.culprit is not None:
            if now > launch.culprit.until:
                return self.fail(explain_end(launch.culprit.replica, launch.culprit.what, ""))
            return []
        overdue = launch.overdue(now)
        if overdue is not None:
            launch.culprit = Culprit(overdue, "is not ready in time", now + LAST_LOG_SECONDS)
            return [Announce(launch.progress(now)), *self.kill(overdue, "", now)]
        if launch.missing():
            return [*launch.reports(now)]
        launch.on("all_ready")
        done: Instructions = []
        for stage in self.pipeline.stages:  # one may have died for good meanwhile
            done += self.fill_places(stage.name)
        done += [TellNode(rank, Launched()) for rank, node in self.nodes.items() if node.present]
        return [*done, Announce(f"ready after {launch.after(now):.1f} s, clients connect to {self.client}")]

    def fail(self, reason: str) -> Instructions:
        """Give up a pipeline that has not been launched; one that has been goes on degraded."""
        if not self.launch.starting:
            return []
        self.launch.on("fail")
        self.launch.failure = reason
        return [GiveUp(reason)]

    def remember(self) -> Instructions:
        """Have the next coordinator know of scale, seats and orders. Those that leave it does not need."""
        kept = [
            RememberedReplica(
                replica.stage,
                replica.index,
                replica.node,
                replica.slot,
                replica.spawn_epoch,
                replica.spare,
                replica.joining,
                replica.orders.drain,
                replica.orders.restart,
            )
            for replica in self.replicas
            if not replica.leaving
        ]
        return [Remember(kept)]

    # -- messages of stage processes ----------------------------------------------------------------------------------

    def from_stage(self, replica_id: ReplicaId, body: StageToCoordinator, now: float) -> Instructions:
        """Take a message on the control connection of a stage process."""
        kind = str(type(body).__struct_config__.tag)
        replica = self.replicas.at(replica_id)
        if isinstance(body, Hello):
            return self._hello(replica_id, body, now)
        if replica is None or not replica.alive:
            done = self._drop_unknown(replica_id, kind)
            if isinstance(body, Heartbeat) and self.replicas.current(replica_id.stage, replica_id.replica) is not None:
                done.append(TellReplica(replica_id, Reregister()))  # it does not know that it counts as lost
            return done
        if replica.state is ReplicaState.STARTING:  # this is about a registration that is over
            return [TellReplica(replica_id, Reregister())]
        match body:
            case Heartbeat():
                replica.beat(body.progress, now)
                replica.counts = body.counts
            case Snapshot():
                return [Measured(replica, body)]
            case Loading(phase=phase):
                replica.phase = phase
            case Fatal(message=message, device=device):
                replica.last_words, replica.device_failed = message, device
            case Ready() if replica.state is ReplicaState.LOADING:
                return self._on_ready(replica, body, now)
            case Ready():
                return self._drop_disorder(replica, kind)
        return []

    def link_cut(self, replica_id: ReplicaId) -> Instructions:
        """Ask a stage process whose link was cut to register again."""
        text = f"the link to {replica_id.name} was cut; the stage should register again"
        return [Log(WARNING, text), TellReplica(replica_id, Reregister())]

    def unreachable(self, peer: ControlPeer, why: str, now: float) -> Instructions:
        """A peer cannot be told what it has to know.

        Another process takes the place of a stage's. The replicas of a node count as dead until it says hello again.
        """
        if self.launch.ending:
            return []
        if isinstance(peer, int):
            node = self.nodes.get(peer)
            return hosts.lose_node(self, node, why, now) if node is not None and node.present else []
        replica = self.replicas.at(peer)
        if replica is None or not replica.alive or replica.orders.killed:
            return []
        return [Log(ERROR, f"killing {replica.name}: {why}", replica.name), *self.kill(replica, why, now)]

    def _hello(self, replica_id: ReplicaId, hello: Hello, now: float) -> Instructions:
        """Register a process, for the first time or again."""
        place = replica_id.stage, replica_id.replica
        current = self.replicas.current(*place)
        if current is not None and current.spawn_epoch == 0:  # its node's hello will say whether it belongs here
            self._early[place] = replica_id, hello
            return []
        if current is None or current.spawn_epoch != (hello.spawn_epoch or replica_id.epoch):
            foreign = Shutdown("the pipeline does not need this process")
            return [*self._drop_unknown(replica_id, "hello"), TellReplica(replica_id, foreign)]
        if replica_id.epoch > current.epoch:  # it registers again
            again: Instructions = []
            if current.registered:
                again += self.lose(current, "it has registered again", restart=True)
            renewed = self.replicas.add(*place, replica_id.epoch, current.spawn_epoch, current.node, current.slot, now)
            renewed.phase = "registering again"
            return again + self._welcome(renewed, hello)
        if replica_id.epoch == current.epoch and current.state is ReplicaState.STARTING:
            return self._welcome(current, hello)
        done = self._drop_disorder(current, "hello")  # it would reset a replica that works
        if hello.again:  # it has lost this coordinator, which may not have noticed: what was on its way is gone
            done.append(TellReplica(replica_id, Reregister()))
        return done

    def _welcome(self, replica: Replica, hello: Hello) -> Instructions:
        difference = self.difference(hello)
        if difference:
            replica.last_words = f"{replica.name}: {difference}."
            return [TellReplica(replica.replica_id, Shutdown(reason=difference))]
        replica.on("hello")
        replica.pid, replica.inbox, replica.remote, replica.arena = hello.pid, hello.inbox, hello.remote, hello.arena
        welcome = TellReplica(replica.replica_id, Welcome(results=self.results))
        return [ReplicaRegistered(replica), welcome, *self._announce_peers()]

    def difference(self, hello: Hello | NodeHello) -> str:
        """What keeps a process from working with this one, "" for nothing."""
        ours = (PROTOCOL_VERSION, omni_actors.__version__, self.pipeline.digest())
        theirs = (hello.protocol, hello.package, hello.config)
        return "" if ours == theirs else f"protocol, package and configuration are {theirs} there and {ours} here"

    def _on_ready(self, replica: Replica, ready: Ready, now: float) -> Instructions:
        replica.heard = replica.moved = now
        replica.become_ready(ready)
        done: Instructions = [ReplicaHolds(replica, ready.held)] if ready.held else []
        if replica.orders.drain:  # given before it registered again
            done += self.drain(replica)
        else:
            done.append(Announce(f"{replica.name} ready in {ready.seconds:.1f} s"))
        done += self.ready_again(replica)
        if self.launch.starting:
            done += self._check_launch(now)
        self._awaited.discard(replica.process)
        return done + self.restored(now)

    def _announce_peers(self) -> Instructions:
        """Tell every stage the addresses of the stages after and before it."""
        if self.restoring:
            return []
        find = self.replicas.peers
        done: Instructions = []
        for replica in self.replicas:
            if replica.registered:
                after, before = self._graph.downstream[replica.stage], self._graph.sources[replica.stage]
                peers = Peers(peers=find(after, replica.node), sources=find(before, replica.node))
                done.append(TellReplica(replica.replica_id, peers))
        return done

    def _drop_unknown(self, replica_id: ReplicaId, kind: str) -> Instructions:
        self.dropped["control_of_unknown_replica"] += 1
        text = f"dropped a {kind} of the unknown replica {replica_id.name} (epoch {replica_id.epoch})"
        return [Log(WARNING, text)]

    def _drop_disorder(self, replica: Replica, kind: str) -> Instructions:
        self.dropped["control_out_of_order"] += 1
        return [Log(WARNING, f"said {kind} while {replica.state}", replica.name)]

    # -- starts -------------------------------------------------------------------------------------------------------

    def start_replica(self, stage: str, index: int, seat: Seat, now: float) -> Instructions:
        """Have a node start a process for a replica."""
        former = self.replicas.current(stage, index)
        spawn_epoch = max(former.epoch + 1 if former is not None else 1, self.new_epoch())
        replica, done = self._expect(stage, index, seat, spawn_epoch, now)
        return [*done, TellNode(replica.node, StartReplica(replica.process, replica.slot))]

    def _expect(self, stage: str, index: int, seat: Seat, spawn_epoch: int, now: float) -> tuple[Replica, Instructions]:
        """Expect the hello of a process, which may have come before its node's; `spawn_epoch` 0: none is known yet."""
        replica = self.replicas.add(stage, index, spawn_epoch, node=seat.node, slot=seat.slot, now=now)
        early = self._early.pop((stage, index), None) if spawn_epoch else None
        return replica, self._hello(*early, now) if early is not None else []

    def adopt(self, process: ReplicaId, seat: Seat, now: float) -> Instructions:
        """Expect the registration of a process that runs. What was ordered of it holds."""
        self._awaited.add(process)
        replica, done = self._expect(process.stage, process.replica, seat, process.epoch, now)
        if replica.state is ReplicaState.STARTING:  # its hello may have been here before its node's
            replica.phase = "registering again"
        item = self._remembered.pop((process.stage, process.replica), None)
        if item is not None and item.spawn_epoch == process.epoch:
            replica.orders.drain, replica.orders.restart = item.drain, item.restart
            if item.restart:
                replica.orders.drain_until = now + self.settings.default_timeout
        return done

    def restart_due(self, now: float) -> Instructions:
        """Start the replicas again whose back-off is over."""
        done: Instructions = []
        for dead in list(self.replicas):
            due = dead.state is ReplicaState.WAITING and dead.restart_at <= now
            if due and self.nodes[dead.node].stays:
                done.append(Announce(f"starting {dead.name} again"))
                done += self.start_replica(dead.stage, dead.index, dead.seat, now)
        return done

    def ready_again(self, replica: Replica) -> Instructions:
        """Let a replica take requests."""
        return [*self.fill_places(replica.stage), ReplicaReady(replica)]

    def fill_places(self, stage: str) -> Instructions:
        """Let spares take the places of replicas that take no requests; during the launch each has its own place."""
        done: Instructions = []
        for spare, replaced in self.replicas.fill_places(stage) if self.launch.serving else ():
            done.append(Announce(f"{spare.name} takes the place of {replaced.name}"))
            done.append(ReplicaReady(spare))
        return done

    # -- ends ---------------------------------------------------------------------------------------------------------

    def died(self, replica: Replica, how: str, log: str, now: float, evidence: Evidence) -> Instructions:
        """Plan a restart. While the pipeline starts, a stage that is left without any replica ends the launch."""
        killed = replica.orders.clear_kill()
        cause, evidence = (f"{killed}; {how}", Evidence.CRASHED) if killed else (how, evidence)
        asked = replica.orders.restart or replica.leaving
        restart = not self.launch.ending and not replica.leaving and plan_restart(self.pipeline, replica, now)
        level = DEBUG if asked or self.launch.ending else ERROR
        done: Instructions = [Log(level, f"ended: {cause}", replica.name)]
        done += self.lose(replica, cause, restart, Evidence.NONE if asked else evidence)
        if replica.leaving:
            done += self.forget(replica)
        if replica.device_failed:
            done += self._kill_beside(replica, now)
        if not self.launch.wanted or replica.leaving:
            return done
        text, culprit = explain_end(replica, f"died ({cause})", log), self.launch.culprit
        if asked:
            done.append(Announce(f"{replica.name} has stopped and restarts"))
        elif culprit is not None and culprit.replica is replica:
            done += self.fail(explain_end(replica, culprit.what, log))
        elif self.launch.starting and not any(peer.alive for peer in self.replicas.of(replica.stage)):
            done += self.fail(text)
        elif restart:
            done.append(Announce(f"{text}\n{replica.name} restarts in {replica.restart_at - now:.1f} s"))
        else:
            done.append(Announce(f"degraded: {text}"))
        return done + (self.restart_due(now) if self.launch.wanted else [])

    def _kill_beside(self, failed: Replica, now: float) -> Instructions:
        """Kill what shares the GPU of a replica that has failed with it, under MPS.

        The driver has ended the contexts of all of them. An idle process does not notice, and while one of them is
        alive, MPS accepts no process (CUDA error 807).
        """
        shared = placement.shared_devices(self.pipeline, failed.node, self.nodes[failed.node].devices)
        names = {name for there in shared.values() if (failed.stage, failed.index) in there for name in there}
        done: Instructions = []
        for replica in self.replicas.on(failed.node) if self.pipeline.mps == "auto" else ():
            if (replica.stage, replica.index) in names and replica.registered and not replica.orders.killed:
                replica.orders.restart = True  # not caused by a request
                done.append(Log(ERROR, f"killing {replica.name}: its GPU failed under {failed.name}", replica.name))
                done += self.kill(replica, f"its GPU failed under {failed.name}", now)
        return done

    def lose(self, replica: Replica, why: str, restart: bool, evidence: Evidence = Evidence.NONE) -> Instructions:
        """End a registration: what the replica held runs again or fails."""
        replica.on("lost" if restart else "given_up")
        self._awaited.discard(replica.process)
        done = [ReplicaLost(replica, why, evidence), *self.fill_places(replica.stage)]
        return done if self.launch.ending else [*done, *self._announce_peers()]

    def forget(self, replica: Replica) -> Instructions:
        """Take a replica that has left out of the pipeline. What it held was replayed before."""
        self.replicas.remove(replica)
        return [Announce(f"{replica.name} has left")]

    def drain(self, replica: Replica) -> Instructions:
        """Have a ready replica finish what it holds and take nothing new."""
        replica.on("drain")
        return [Announce(f"{replica.name} drains"), *self.fill_places(replica.stage)]

    def stop_drained(self, now: float) -> Instructions:
        """Ask replicas to end that have drained for a restart, or to leave."""
        done: Instructions = []
        for replica in filter(lambda replica: replica.should_stop(now), self.replicas):
            replica.stopping = True
            replica.orders.stop_until = now + STOP_SECONDS
            reason = "it leaves" if replica.leaving else "it is restarted"
            done.append(TellReplica(replica.replica_id, Shutdown(reason=reason)))
        return done

    def _kill_stuck(self, now: float) -> Instructions:
        """Kill what is stuck. While the pipeline starts, the startup timeout ends the launch instead."""
        done: Instructions = []
        for replica in self.replicas if self.launch.serving else ():
            if replica.orders.killed or not (why := why_stuck(self.pipeline, replica, now)):
                continue
            node_silent = self.nodes[replica.node].heard + 3 * self.settings.heartbeat_interval < now
            if node_silent and now < replica.heard + self.settings.heartbeat_timeout + KILL_SECONDS:
                continue  # it may be the link: the order would reach a healthy process once the link is back
            done.append(Log(ERROR, f"killing {replica.name}: {why}", replica.name))
            done += self.kill(replica, why, now)
        return done

    def kill(self, replica: Replica, why: str, now: float) -> Instructions:
        """Have its node kill the process of a replica."""
        replica.orders.kill(why, until=now + KILL_SECONDS)
        return [TellNode(replica.node, KillReplica(replica.process))]

    def _enforce_ends(self, now: float) -> Instructions:
        """Kill what did not stop, and count as dead what did not end when killed."""
        done: Instructions = []
        for replica in list(self.replicas):
            if replica.orders.stop_until <= now:
                done += self.kill(replica, "it did not stop", now)
            if replica.orders.kill_until <= now and replica.alive:
                done += self.died(replica, "its node does not answer", "", now, Evidence.NONE)
        return done
