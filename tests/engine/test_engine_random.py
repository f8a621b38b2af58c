"""Any order of commands: exactly one end for each request, with the tokens it would have had alone."""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.request import Completion, Request, SamplingParams, StopRule
from tests.engine.host import Host, ask, assert_same, solo

Shape = tuple[int, int, int, bool, bool]
shapes = st.tuples(
    st.integers(1, 60),  # prompt
    st.integers(1, 40),  # max_tokens
    st.integers(0, 3),  # order
    st.booleans(),  # in a group
    st.booleans(),  # prompt_logprobs
)
STOPS = StopRule(ids=frozenset(range(0, 512, 37)))


def build(name: str, shape: Shape, seed: int) -> Request:
    prompt, max_tokens, order, grouped, scored = shape
    return ask(
        name,
        range(1, (49 if grouped else prompt) + 1),
        max_tokens,
        order=order,
        group="g" if grouped else "",
        prompt_logprobs=scored,
        params=SamplingParams(seed=seed % 7),
        stop=STOPS,
    )


@cache
def alone(shape: Shape, seed: int) -> Completion:
    return solo(build("alone", shape, seed))


class EngineMachine(RuleBasedStateMachine):
    """Commits replace the weights by equal ones, so that tokens stay those of the request alone."""

    host: Host

    @initialize(
        lazy=st.booleans(), overlap=st.booleans(), num_blocks=st.sampled_from([8, 12, 64]), slots=st.integers(1, 5)
    )
    def begin(self, lazy: bool, overlap: bool, num_blocks: int, slots: int) -> None:
        self.host = Host(
            lazy=lazy,
            overlap=overlap,
            max_running=slots,
            max_step_tokens=24,
            max_context=112,
            runner={"num_blocks": num_blocks},
        )
        self.added: dict[str, Shape] = {}
        self.aborted: set[str] = set()
        self.version = 1

    @rule(shape=shapes)
    def add(self, shape: Shape) -> None:
        name = f"r{len(self.added)}"
        self.host.add(build(name, shape, len(self.added)))
        self.added[name] = shape

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        self.host.step(times)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.added)))
        self.host.engine.abort(name, "abort_client")
        self.aborted.add(name)

    @rule()
    def abort_started(self) -> None:
        self.host.engine.abort_started("abort_weight_update")
        assert not self.host.engine.has_started
        self.aborted |= set(self.added)

    @rule()
    def commit(self) -> None:
        self.version += 1
        self.host.engine.commit(lambda: None, self.version)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        (self.host.engine.pause if paused else self.host.engine.resume)()

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        (self.host.engine.hold if held else self.host.engine.release)()

    @precondition(lambda self: self.host.scheduler.table.num_running)
    @rule()
    def preempt(self) -> None:
        self.host.engine.drain()
        if self.host.scheduler.table.num_running:
            self.host.engine._preempt(self.host.scheduler.newest_running())

    @invariant()
    def every_request_is_live_or_has_ended(self) -> None:
        live = {request.id for request in self.host.engine.live_requests()}
        unread = {completion.request_id for completion in self.host.engine._ended}
        assert sorted([*live, *unread, *self.host.ended]) == sorted(self.added)
        stats = self.host.engine.stats()
        assert stats.running + stats.waiting == len(live)

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.engine.resume()
        self.host.engine.release()
        self.host.run()
        self.host.check_empty()
        assert set(self.host.ended) == set(self.added)
        for i, (name, shape) in enumerate(self.added.items()):
            ended, expected = self.host.ended[name], alone(shape, i % 7)
            versions = [version for version, _ in ended.weight_versions]
            assert versions == sorted(set(versions))
            if ended.finish_reason.startswith("abort"):
                assert name in self.aborted
                count = len(ended.token_ids)
                assert ended.token_ids.tolist() == expected.token_ids[:count].tolist()
                assert sum(count for _, count in ended.weight_versions) == count
            else:
                assert_same(ended, expected)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
