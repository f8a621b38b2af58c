"""What answers the model: the one interface of all environments, and the values that cross it.

    class Echo(Environment):
        async def step(self, turn: TurnResult) -> Step:
            return Step(observation=turn.token_ids, done=turn.index == 2, reward=1.0)

Token ids are the currency. Every method may be a plain `def` instead: it then runs on a thread of its own, so that
it may block. docs/environments.md says what happens to an environment that raises, hangs or returns nonsense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from engine.request import FloatArray, IntArray
from protocols.fields import Purpose, Record, Turn, TurnReason
from protocols.requests import Continue

if TYPE_CHECKING:
    from rollout.chat.conversation import Conversation

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids in [0, vocab_size): a list of ints or a one-dimensional integer array."""


class TextCodec(Protocol):
    """What an environment may do with the checkpoint's tokenizer (rollout/chat/tokenizer.py)."""

    def encode(self, text: str) -> IntArray:
        """int32[n]. The text is data: no control token can come out of it, whatever it spells."""

    def decode(self, ids: Ids) -> str:
        """Ids without text (a padded head's) become ''."""

    def special(self, token: str) -> int:
        """The id of one added token, such as `<|im_end|>`. Raises KeyError."""


@dataclass(frozen=True, slots=True)
class Context:
    """What an environment learns at `reset`. metadata, config: private copies of the submit's.

    seed is the group's (the same for its samples); (seed, sample_index) is the trajectory's own.
    prompt: int32[L]. vocab_size: ids are valid in [0, vocab_size). max_context: longest sequence, in tokens.
    chat: of a group that was submitted with messages: what was said, and how to go on.
    ask: puts a turn to the trainer and waits for its `continue`, as `remote` does (asynchronous methods only).
    """

    trajectory_id: str
    group_id: str
    sample_index: int
    seed: int
    prompt: IntArray
    vocab_size: int
    max_context: int
    ask: Callable[[TurnResult], Awaitable[Continue]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    purpose: Purpose = "train"
    tokenizer: TextCodec | None = None
    chat: Conversation | None = None

    def encode(self, text: str) -> IntArray:
        return self._codec().encode(text)

    def decode(self, ids: Ids) -> str:
        return self._codec().decode(ids)

    def _codec(self) -> TextCodec:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: this environment has to work with token ids")
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One sampled turn. token_ids: int32[n], logprobs: float32[n] of the primary mode, both read-only.

    finish_reason: `stop`, or `length` / `turn_deadline` when the turn was cut and the trajectory goes on.
    total_len: tokens of the trajectory after this turn.
    before: int32[m], read-only: all tokens of its segment before the turn. In a process of its own an environment has
        them only where its conversation may branch.
    """

    turn: Turn
    token_ids: IntArray
    logprobs: FloatArray
    total_len: int
    before: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def index(self) -> int:
        return self.turn.index

    @property
    def finish_reason(self) -> TurnReason:
        return self.turn.finish_reason


@dataclass(frozen=True, slots=True)
class Observation:
    """What `reset` may add to the prompt: glue, then ids. max_tokens: budget of the first turn."""

    ids: Ids | None = None
    glue: Ids | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one turn. Appended in this order: `glue` (template tokens), `observation`, `opening` (template
    tokens that open the next turn).

    done: no further turn. reward: of the turn just played. max_tokens: budget of the next turn; None keeps
    `Sampling.max_tokens`. called: the turn called tools, which is then its finish reason instead of `stop`.
    branch: begin a new segment with these ids in place of everything so far.
    """

    observation: Ids | None = None
    glue: Ids | None = None
    done: bool = False
    reward: float | None = None
    max_tokens: int | None = None
    opening: Ids | None = None
    called: bool = False
    branch: Ids | None = None


@dataclass(frozen=True, slots=True)
class Rewards:
    """A final reward in named parts whose total is not their sum (or is unknown: None)."""

    total: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


FinalReward = float | Mapping[str, float] | Rewards | None


class Environment(ABC):
    """One trajectory's environment: made for it, asked turn by turn, closed at its end.

    Each method may be `async def` (it runs on the worker's loop and must not block) or `def` (on a thread).
    """

    on_length: ClassVar[Literal["end", "continue"]] = "end"
    """Does a turn that was cut end the trajectory, where `Budget.on_length` does not say."""
    fixed_turns: ClassVar[bool] = False
    """The number of turns is known beforehand: the trajectory ends the way its last turn does (`stop`, `length`)."""
    isolation: ClassVar[Literal["worker", "process"]] = "worker"
    """Where the code runs: in the worker, or in a process that several environments share and that may burn the CPU,
    crash, or be killed at a deadline."""
    chat_roles: ClassVar[tuple[str, ...]] = ()
    """Roles of the messages that it appends to a conversation: a submit is refused where the chat template cannot."""
    stateless: ClassVar[bool] = False
    """`step` depends on the turn and what `reset` made, not on earlier turns: `reset` is enough to go on elsewhere."""
    immediate: ClassVar[bool] = False
    """`step` is a plain method that neither waits nor blocks: the worker calls it where it is, without a thread."""
    patient: ClassVar[bool] = False
    """`step` waits for the trainer, whose silence is no fault: only `Budget.tool_deadline_s` bounds it."""

    def reset(self, context: Context) -> Observation | Awaitable[Observation | None] | None:  # noqa: ARG002
        """Called first. May add tokens to the prompt."""
        return None

    @abstractmethod
    def step(self, turn: TurnResult) -> Step | Awaitable[Step]:
        """Called after each turn, also after one that was cut when the trajectory goes on."""

    def finish(self, record: Record) -> FinalReward | Awaitable[FinalReward]:  # noqa: ARG002
        """Score the trajectory: called once when it is completed or truncated, never when aborted or failed.

        record: as it will be sent, the final reward still missing. A mapping is named parts, their sum the total.
        """
        return None

    def snapshot(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """What `restore` needs to go on from here: plain values, as in a submit's metadata. Called between two turns.

        Optional: without it (and where the class is not `stateless`) a trajectory that was cut cannot go on elsewhere.
        """
        raise NotImplementedError

    def restore(self, context: Context, state: Mapping[str, Any]) -> Awaitable[None] | None:
        """Called in place of `reset` where a trajectory goes on; state: what `snapshot` returned."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:  # noqa: B027 (nothing to release is the usual case)
        """Called last, always, once the environment was made."""


def is_default(made: Environment | type[Environment], method: str) -> bool:
    """A default of the base class says nothing: it need not be called.

    Looked up, not asked for, which may run code. `inspect.getattr_static` takes fifteen times as long, several times a
    trajectory.
    """
    kind: type[Any] = type(made)
    if issubclass(kind, type):
        kind = cast(type[Any], made)
    elif method in object.__getattribute__(made, "__dict__"):
        return False
    for base in kind.__mro__:
        if method in base.__dict__:
            return base is Environment
    return False


EnvironmentFactory = Callable[[], Environment | Awaitable[Environment]]
"""Makes one trajectory's environment: a subclass of `Environment` that needs no arguments is one."""
EnvironmentSource = EnvironmentFactory | Environment
"""A factory, or an environment that nothing has to be called for."""


def said_by(factory: object) -> object:
    """What says what the environments will be like: what the factory wraps (its `factory`), else itself."""
    return getattr(factory, "factory", factory)
