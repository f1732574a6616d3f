"""Where the hosts of a job meet: a torch rendezvous handler for torch's elastic agent.

One host serves a registry (``registry.py``), to which each host reports what it does
(:class:`HostReport`), and derives what is to be done (:class:`JobState`). Every host, in a thread
beside its agent, reads that ten times a second.

Host 0 serves, at the address of ``--rdzv``. A host that is alone needs no registry.

torch's own handler (``DynamicRendezvousHandler``) is not used. It compares clocks of hosts, numbers
hosts by their names, unpickles what it is sent, and does not tell the others who was lost.

If the host that serves is lost, another one does. See :meth:`Rendezvous._move`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import math
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shardwise.base import plain
from shardwise.base.errors import UserError
from shardwise.base.repeated import Repeated
from shardwise.base.say import say
from shardwise.base.units import counted, version_of
from shardwise.elastic.clock import Clock, Timers, process_clock
from shardwise.elastic.hosts import Nodes
from shardwise.elastic.membership import (
    Host,
    HostLoss,
    HostReport,
    JobState,
    Next,
    Standing,
    Verdict,
)
from shardwise.elastic.network import (
    address_towards,
    format_endpoint,
    listening,
    parse_endpoint,
)
from shardwise.elastic.outcome import Outcome
from shardwise.elastic.registry import Presence, Registry, RegistryClient
from shardwise.elastic.store import (
    CLOSED,
    GuardedStore,
    StoreDroppedError,
    StoreRefusedError,
    connect,
    serve_ranks,
)

SILENCE = 10.0  # seconds without a sign of life after which a host counts as lost
_POLL = 0.1  # seconds between looks at what is to be done
_POLL_PER_HOST = 0.005  # seconds for each host, if that is more
_LINGER = 5.0  # seconds for hosts to read the last verdict
_GLANCE = 0.02  # seconds between looks at what the thread has read
_RETRY = 0.3  # seconds between attempts to connect
_ATTEMPT = 2.0  # seconds for one attempt
_GUIDING = 1.0  # seconds between looks for hosts that come to --rdzv after a move
_MOVED = "moved"  # the key that shows newcomers where the hosts meet now: "ID ADDRESS:PORT"
_VOTE = "vote/"  # before the id of a host: the last plan that it has read

_FAILURES = (OSError, RuntimeError)  # of a store that cannot be reached, ours or torch's


class Order(enum.Enum):
    """What the job asks of the ranks of this host."""

    CONTINUE = "continue"
    SAVE_AND_STOP = "save and stop"  # once they train, since more hosts join
    ABORT = "abort"  # at once: the job, or its generation, has ended elsewhere


class LostError(UserError):
    """The rendezvous is gone, or the others have continued without this host."""

    exit_code = 1


class Rendezvous(RendezvousHandler):
    """This host's part in the meeting of all hosts.

    Args:
        nodes: the job, as this host was given it.
        nproc: ranks of this host.
        restarts: how often to restart after a failure, with the hosts that remain.
        stopped: whether a signal asked to stop.
        clock: by which others are silent; by default that of this process.

    Attributes:
        nodes: the job.
        nproc: ranks of this host.
        restarts: as passed.
        generation: the number of the generation that this host takes part in; -1 before the first.
        hosts: the number of hosts in it.
        verdict: what followed it; None while it runs.
        before_waiting: called when this host is about to say that it waits for a generation, which
            may end the one that is running.
    """

    def __init__(
        self,
        nodes: Nodes,
        nproc: int,
        restarts: int,
        stopped: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.nodes, self.nproc, self.restarts = nodes, nproc, restarts
        self.generation, self.hosts = -1, 1
        self.verdict: Verdict | None = None
        self.before_waiting: Callable[[], None] = lambda: None
        self._stopped = stopped
        self._id = uuid.uuid4().hex
        self._client: RegistryClient[HostReport, JobState] | None = None
        self._registry: Registry[HostReport] | None = None  # which it serves, or may
        self._server_port = 0
        self._met_at = ""  # id of the host to which the meeting has moved
        self._ranks_store: Store | None = None  # which the ranks use, if this host is first
        self._report: HostReport | None = None  # what this host does
        self._state: JobState | None = None  # what is to be done, if this host decides
        self._seen = JobState()  # the same as it was read or published last
        self._noticed: int | None = None  # how many notices were said
        self._clock = clock or process_clock()
        self._timers = Timers(self._clock.now)
        self._turned = 0.0  # when the thread did that last
        self._began = 0.0  # when the generation did
        # With many hosts less often, so that the one that serves them has time for them.
        self._touch = Repeated(
            self._keep_in_touch,
            lambda: max(_POLL, _POLL_PER_HOST * len(self._seen.hosts)),
            "shardwise rendezvous",
        )
        self._guide = Repeated(self._guide_newcomers, lambda: _GUIDING, "shardwise guide")

    @property
    def is_alone(self) -> bool:
        """Whether the job is on this host alone."""
        return self.nodes.count == 1 and not self.nodes.is_elastic

    # -- what torch's agent asks -------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all hosts of the next generation.

        Raises:
            UserError: this host is refused, or not all hosts came in time.
            LostError: the rendezvous is gone, or the others have continued without this host.
            RendezvousGracefulExitError: a signal asked to stop.
        """
        listener = listening(self.nodes.address if self.is_alone else self._own_address())
        try:
            port = listener.getsockname()[1]
            if self._report is None:
                try:
                    self._join()
                except _FAILURES as error:  # the other end has gone in the middle of it
                    reason = error.__cause__ or error
                    raise UserError(f"--rdzv: {reason}") from error
            self.before_waiting()
            seen = self._wait_for_generation(port)
            members = sorted(seen.members, key=lambda host: host.number)
            index = next(at for at, host in enumerate(members) if host.id == self._id)
            first = members[0]
            self._ranks_store = None  # closes that of the generation before
            if index == 0:
                self._ranks_store = serve_ranks(first.address, listener)
        finally:
            listener.close()
        self.generation, self.hosts, self._began = seen.generation, len(members), self._clock.now()
        self.verdict = None
        if self.nodes.is_elastic:
            last = (index + 1) * self.nproc - 1
            ranks = f"rank {last}" if self.nproc == 1 else f"ranks {index * self.nproc} to {last}"
            size = self.hosts * self.nproc
            say(f"hosts      {counted(self.hosts, 'host')}; {ranks} of {size} here")
        shared: Store = HashStore() if self._client is None else self._client.store
        store = PrefixStore(f"shardwise/{self.generation}", shared)
        where = RendezvousStoreInfo(first.address, first.store_port)
        return RendezvousInfo(store, index, len(members), where)

    def num_nodes_waiting(self) -> int:
        """Return 1 if another generation follows this one, else 0."""
        return int(self.verdict is not None and self.verdict.next.begins_again)

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._seen.is_over

    def set_closed(self) -> None:
        """Do nothing: the job is over when its ranks have ended, see :meth:`end`."""

    def shutdown(self) -> bool:
        """Leave, once the other hosts have had time to read what follows."""
        deadline = self._clock.now() + _LINGER
        if self._report is not None:
            self._tell(leaves=True)
        while self._touch.is_running and self._clock.now() < deadline:
            is_told = self._client is None or self._client.reported == self._report
            if is_told and not self._is_needed():
                break
            time.sleep(_GLANCE)
        self._guide.close(0)
        self._touch.close(2 * SILENCE)
        if self._client is not None:
            self._client.store.close()
        if self._registry is not None:
            self._registry.close()
        self._ranks_store = None
        return True

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "shardwise"

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return "shardwise"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store that the first host serves for them."""
        return True

    # -- what our agent asks and reports -----------------------------------------------------------

    def order(self) -> Order:
        """Return what the job asks of this host's ranks. Call it often.

        Raises:
            LostError: the rendezvous is gone, or the others have continued without this host.
        """
        self._check()
        seen = self._seen
        self._say_news(seen)
        parted = seen.parted.get(self._id)
        if parted is not None:
            self.verdict = parted
        elif seen.host(self._id) is None or seen.generation > self.generation:
            raise self._left_behind()
        elif seen.generation == self.generation:
            self.verdict = seen.verdict
        if self.verdict is not None:
            return Order.ABORT
        return Order.SAVE_AND_STOP if seen.regrouping else Order.CONTINUE

    def report_step(self) -> None:
        """Report that all ranks of this host have completed a step in this generation."""
        assert self._report is not None
        if self._report.stepped != self.generation:
            self._tell(stepped=self.generation)

    def end(self, outcome: Outcome) -> None:
        """Report how this host's ranks ended; ``verdict`` is set when it is known what follows."""
        by = outcome.stopped_by
        self._tell(ended=self.generation, result=outcome.result, stopped_by=by)

    @property
    def job_id(self) -> str:
        """Tells the job from every other one; the same after a restart, and on all hosts."""
        return self._seen.job

    # -- meeting -----------------------------------------------------------------------------------

    def _own_address(self) -> str:
        """Return the address at which the other hosts reach this one."""
        nodes = self.nodes
        if nodes.rank == 0:
            return nodes.address
        try:
            return address_towards(nodes.address)
        except OSError as error:
            raise self._unreachable(error) from None

    def _join(self) -> None:
        """Take part in the job, or be refused."""
        if self.is_alone:
            self._decide_from(self._first_state())
        else:
            self._use(self._meet())
        self._report = HostReport(
            self.nodes.rank, self._own_address(), self._server_port, self._agreed()
        )
        self._turned = self._clock.now()
        self._touch.start()

    def _use(self, store: GuardedStore) -> None:
        """Report to the host that serves this store, and read there what is to be done."""
        if self._client is not None:
            self._client.store.close()
        self._client = RegistryClient(store, self._id, JobState)
        self._turned = self._clock.now()

    def _meet(self) -> GuardedStore:
        """Connect to the host that serves the rendezvous; it may be this one."""
        nodes = self.nodes
        if nodes.rank == 0:
            try:
                listener = listening(nodes.address, nodes.port)
            except OSError as error:
                raise UserError(
                    f"--rdzv: host 0 cannot listen at {nodes.where} ({error.strerror or error}); "
                    "expected an address of this host, and a free port"
                ) from None
        else:
            listener = listening(self._own_address())  # in case that the host that serves is lost
        self._server_port = listener.getsockname()[1]
        self._registry = Registry(listener, nodes.token, HostReport, self._clock)
        if nodes.rank == 0:
            self._decide_from(self._first_state())
        try:
            return connect(
                lambda: GuardedStore(nodes.address, nodes.port, nodes.token, self._id, SILENCE),
                patience=nodes.timeout,
                pause=_RETRY,
                look=self._look_for_stop,
            )
        except StoreRefusedError as error:
            raise UserError(f"--rdzv: {error}") from None
        except OSError as error:
            raise self._unreachable(error) from None

    def _first_state(self) -> JobState:
        return JobState(terms=self._agreed(), restarts=self.restarts, server=self._id)

    def _look_for_stop(self) -> None:
        if self._stopped():
            raise RendezvousGracefulExitError("a signal asked to stop")

    def _decide_from(self, state: JobState) -> None:
        """Decide from now on what is to be done, given what is known so far."""
        self._state, self._timers = state, Timers(self._clock.now)
        self._seen = self._publish(state)

    def _publish(self, state: JobState) -> JobState:
        if self._registry is not None:
            self._registry.publish(state)
        return copy.deepcopy(state)

    def _unreachable(self, error: OSError) -> UserError:
        nodes = self.nodes
        return UserError(
            f"--rdzv: host 0 cannot be reached at {nodes.where} for {nodes.timeout:.0f} s "
            f"({error.strerror or error}); is the command running there, and the port open? "
            "`shardwise doctor` checks further"
        )

    # -- taking part -------------------------------------------------------------------------------

    def _agreed(self) -> dict[str, Any]:
        """Return what all hosts have to agree on."""
        facts: dict[str, Any] = {"--nnodes": self.nodes.nnodes, "--nproc": self.nproc}
        facts |= {name: version_of(name) or "not installed" for name in ("shardwise", "torch")}
        if self.nodes.is_elastic:
            facts |= self.nodes.options
        agreed: dict[str, Any] = json.loads(json.dumps(facts))
        return agreed

    def _wait_for_generation(self, store_port: int) -> JobState:
        after = self.generation
        self._tell(awaits=after, store_port=store_port)
        while True:
            self._check()
            seen = self._seen
            last = seen.parted.get(self._id, seen.verdict if seen.is_over else None)
            if last is not None:
                kind = LostError if last.next is Next.FAIL else UserError
                raise kind(last.text or f"--rdzv: the job at {self.nodes.where} has ended")
            me = seen.host(self._id)
            if me is not None:
                if self._noticed is None:  # the first time that this host is among the others
                    self._noticed = seen.noticed
                    if me.standing is Standing.JOINING:
                        say("hosts      the other hosts finish a step, and continue with this host")
                self._say_news(seen)
                if seen.generation > after and me.standing is not Standing.JOINING:
                    if seen.is_running:
                        return seen
                    after = seen.generation  # it ended before this host has seen it
                    self._tell(awaits=after)
            self._look_for_stop()
            time.sleep(_GLANCE)

    def _say_news(self, seen: JobState) -> None:
        unread = seen.noticed - (self._noticed or 0)
        for text in seen.notices[max(0, len(seen.notices) - unread) :]:
            say(f"hosts      {text}")
        self._noticed = seen.noticed

    # -- staying in touch --------------------------------------------------------------------------

    def _tell(self, **changes: Any) -> None:
        """Report what this host does, soon."""
        assert self._report is not None
        self._report = replace(self._report, **changes)
        self._touch.wake()

    def _check(self) -> None:
        """Raise what has ended the thread."""
        if self._touch.error is not None:
            raise self._touch.error
        if self._touch.is_running and self._clock.now() - self._turned > 3 * SILENCE:
            raise LostError(self._lost(f"no answer for {3 * SILENCE:.0f} s"))

    def _lost(self, why: str) -> str:
        return (
            f"{self._server_name()} was lost: {why}; the job ends here. Start it again on all "
            "hosts with --auto-resume"
        )

    def _server_name(self) -> str:
        server = self._seen.host(self._seen.server)
        name = f"host 0 ({self.nodes.where})"
        if server is not None and self._seen.moves:
            name = f"host {server.number} ({format_endpoint(server.address, server.port)})"
        return name

    def _left_behind(self) -> LostError:
        follows = "Once they have ended, start the job again on all hosts with --auto-resume"
        if self.nodes.is_elastic:
            follows = "Start the same command here again to join them"
        return LostError(
            f"{self._server_name()} was lost: this host was suspended, and counts as lost; the "
            f"others have gone on without it. {follows}"
        )

    def _is_needed(self) -> bool:
        """Whether other hosts have not read yet what follows, in the store that is served here."""
        if self._state is None or self._registry is None:
            return False
        seen = self._seen
        if seen.is_over:
            return any(name != self._id for name in self._registry.store.clients())
        return seen.generation == self.generation and not all(host.ready for host in seen.hosts)

    def _keep_in_touch(self) -> None:
        try:
            self._turn()
        except _FAILURES as error:
            if not self._touch.is_closing:
                self._recover(error)

    def _turn(self) -> None:
        if self._client is not None:
            self._go_where_they_meet(self._client.store)
            self._client.report(self._report)
        if self._state is not None:
            self._decide(self._state)
        elif self._client is not None:
            try:
                seen = self._client.news()
            except ValueError:
                raise UserError(
                    f"--rdzv: {self._server_name()} runs another version of Shardwise; install the "
                    "same on all hosts"
                ) from None
            if seen is not None:
                self._read(seen)
        self._turned = self._clock.now()

    def _read(self, seen: JobState) -> None:
        """Take note of what is to be done."""
        before, self._seen = self._seen, seen
        is_known = seen.host(self._id) is not None or self._id in seen.parted
        leaves = seen.is_over or (self._report is not None and self._report.leaves)
        if before.host(self._id) is not None and not is_known and not leaves:
            raise self._left_behind()

    def _decide(self, state: JobState) -> None:
        """Derive what is to be done from what hosts report, and publish it."""
        registry, here = self._registry, {host.id for host in state.hosts}
        if registry is None:
            assert self._report is not None
            presence = Presence({self._id: self._report}, {self._id: 0.0}, {})
        else:
            presence = registry.look()
        connected = presence.silence.keys() | here
        reports = {id_: each for id_, each in presence.reports.items() if id_ in connected}
        state.look(reports, self._losses(state, presence), self.nodes, self._timers)
        if state != self._seen:
            self._read(self._publish(state))
        if registry is not None:
            left = {host.id for host in state.hosts}
            for id_ in here - left - state.parted.keys() - {self._id}:
                # One that went silent and comes back finds out that the others have continued.
                registry.store.drop(id_, "counts as lost")
            registry.forget_all_but(left)

    def _losses(
        self, state: JobState, presence: Presence[HostReport]
    ) -> dict[str, tuple[HostLoss, str]]:
        """Return the hosts that are gone, and how that shows.

        One that has said goodbye may have gone to meet others elsewhere: it is silent here.
        """
        losses: dict[str, tuple[HostLoss, str]] = {}
        served = self._timers.elapsed("served", self._id)
        for host in state.hosts:
            if host.id == self._id or host.loss is HostLoss.DEAD:
                continue
            if host.id in presence.closed:
                is_dead = _refuses(host.address, host.port)
                # While this host was suspended, the others may have continued, and ended since.
                is_dead &= not self._clock.was_suspended(self._began, SILENCE / 2)
                loss = HostLoss.DEAD if is_dead else HostLoss.SILENT
                losses[host.id] = loss, presence.closed[host.id]
            elif min(presence.silence.get(host.id, math.inf), served) > SILENCE:
                losses[host.id] = HostLoss.SILENT, f"no sign of life for {SILENCE:.0f} s"
        return losses

    def _go_where_they_meet(self, store: GuardedStore) -> None:
        """Go on from ``--rdzv`` to where the hosts meet now, if they have moved.

        A host 0 that was started again may serve newcomers there as well, until all have gone on.
        """
        is_new = self.generation < 0 and self._seen.generation < 0
        if not is_new or not store.check([_MOVED]):
            return
        server, where = _named(store.get(_MOVED))
        if where is None or server == self._met_at:
            return
        try:
            self._use(GuardedStore(*where, self.nodes.token, self._id, SILENCE))
        except OSError:
            return  # lost as well; its follower will report that
        self._met_at = server
        self._state, self._seen, self._noticed = None, JobState(), None

    def _guide_newcomers(self) -> None:
        """Show hosts that come to ``--rdzv`` where the hosts meet now, which this host serves."""
        nodes, name = self.nodes, f"guide {self._id}"
        with contextlib.suppress(OSError, UserError):
            guide = GuardedStore(nodes.address, nodes.port, nodes.token, name, _ATTEMPT)
            with contextlib.closing(guide):
                guide.set(_MOVED, self._here())

    def _here(self) -> str:
        return f"{self._id} {format_endpoint(self._own_address(), self._server_port)}"

    # -- moving the rendezvous ---------------------------------------------------------------------

    def _recover(self, error: BaseException) -> None:
        """Go on after the store failed: meet elsewhere if that is sound, or raise why not."""
        seen, cause = self._seen, error.__cause__ or error
        silent = isinstance(cause, TimeoutError)
        why = f"no sign of life for {SILENCE:.0f} s" if silent else "the connection was closed"
        suspended = self._clock.was_suspended(self._turned, SILENCE if silent else SILENCE / 2)
        if suspended or isinstance(cause, StoreDroppedError):
            raise self._left_behind() from error
        me = seen.host(self._id)
        ends = self._state is not None or me is None or seen.is_over or seen.generation < 0
        is_loss = seen.host(seen.server) is not None  # or it has left in order
        ends |= seen.is_running and is_loss and not seen.restarts
        if ends or not self._move(why, silent):
            raise LostError(self._lost(why)) from error

    def _move(self, why: str, silent: bool) -> bool:
        """Meet at the host with the lowest number, of those that can be reached, if that is sound.

        Two halves of a job must never both continue. A host whose system refuses connections at its
        port has ended. A host that is silent may continue, so a majority of the others is needed.
        """
        seen = self._seen
        server = seen.host(seen.server)
        gone = [] if server is None else [server]
        dead = set() if silent else {each.id for each in gone if _refuses(each.address, each.port)}
        voters = [host for host in seen.members if host.loss is HostLoss.NONE]
        voters.sort(key=lambda voter: voter.number)
        for host in voters:
            if host.id == self._id:
                return self._serve(voters, gone, dead, why)
            if host.id == seen.server:
                continue
            if self._follow(host):
                return True
            gone.append(host)
            if _refuses(host.address, host.port):
                dead.add(host.id)
        return False

    def _follow(self, host: Host) -> bool:
        """Meet at another host, once it serves the rendezvous; return whether it does."""
        deadline = self._clock.now() + 2 * SILENCE
        vote = f"{_VOTE}{self._id}"
        try:
            store = GuardedStore(host.address, host.port, self.nodes.token, self._id, SILENCE)
        except OSError:
            return False
        try:
            store.set(vote, plain.written(self._seen))
            while not store.check([_MOVED]) or not store.get(_MOVED).startswith(host.id.encode()):
                if self._clock.now() > deadline or self._touch.is_closing:
                    store.delete_key(vote)
                    store.close()
                    return False
                self._touch.sleep(_POLL)
        except _FAILURES:
            store.close()
            return False
        self._use(store)
        return True

    def _serve(self, voters: list[Host], gone: list[Host], dead: set[str], why: str) -> bool:
        """Serve the rendezvous, if the hosts that come here are enough."""
        try:
            address = self._own_address()
            store = GuardedStore(address, self._server_port, self.nodes.token, self._id, SILENCE)
        except (UserError, *_FAILURES):  # its own link is down
            return False
        assert self._registry is not None
        here = self._registry.store
        others = [host.id for host in voters if host not in gone and host.id != self._id]
        needed = len(voters) - len(dead)
        began = self._clock.now()
        while True:
            votes, left = here.values(_VOTE), here.values(CLOSED)
            came = [votes[id_] for id_ in others if id_ in votes and id_ not in left]
            waited = self._clock.now() - began
            enough = 2 * (1 + len(came)) > needed
            if len(came) == len(others) or (enough and waited > SILENCE / 2):
                break
            if waited > 1.5 * SILENCE or self._touch.sleep(_POLL):
                break
        suspended = self._clock.was_suspended(began, SILENCE / 2)  # they may have met elsewhere
        if suspended or not enough or self._touch.is_closing:
            store.close()
            if suspended:
                raise self._left_behind()
            return False
        # Some may have read later changes than this host.
        known = [self._seen, *(plain.read(JobState, vote) for vote in came)]
        seen = max(known, key=lambda each: (each.generation, not each.is_running, each.noticed))
        for host in gone:
            seen.note_lost(host.id, HostLoss.DEAD if host.id in dead else HostLoss.SILENT, why)
        seen.server, seen.moves = self._id, seen.moves + 1
        self._use(store)
        self._decide_from(seen)
        store.set(_MOVED, self._here())
        if self.nodes.is_elastic:
            self._guide.start()
        return True


def _named(place: bytes) -> tuple[str, tuple[str, int] | None]:
    """Read ``ID ADDRESS:PORT``."""
    server, _, endpoint = place.decode(errors="replace").partition(" ")
    return server, parse_endpoint(endpoint)


def _refuses(address: str, port: int) -> bool:
    """Whether the system of a host answers that nothing listens at its port: it has ended."""
    deadline = time.monotonic() + _ATTEMPT
    while time.monotonic() < deadline:  # a process that ends closes one socket after the other
        try:
            socket.create_connection((address, port), timeout=_ATTEMPT).close()
        except ConnectionResetError:
            pass
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        time.sleep(_POLL)
    return False
