"""A rank with a hanging thread in a running process is detected by that thread's lack of progress."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import UnavailableError, WorkerLostError
from contract.identity import Role
from contract.requests import EngineRequest, SendTransfer
from contract.sampling import SamplingParams
from engine.client import ProcessClient
from engine.connecting import Transfers
from engine.distributed.rank_watch import CallCount
from engine.executor import RanksExecutor, create_executor
from engine.hosting.watching import COMPUTING_FACTOR, RANK_CALLS, EngineWatch, LivenessTimeouts
from engine.kv_cache.startup import initialize_kv_cache
from engine.outputs import SchedulerOutput
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.checkpoints import make_checkpoint
from tests.engine_pair import transfer_factory
from tests.engine_parallel.hanging_half import HangingRanks, StuckFactory

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""

HUNG_SECONDS = 30.0
STEP_SECONDS, DATA_SECONDS = 2.0, 8.0
"""Far below rank_timeout_seconds, which would also end the engine."""
COMPUTED = 10**9

LOOKS = st.lists(st.tuples(st.floats(0.01, 40.0), st.booleans(), st.booleans()), max_size=60)


def settings(model: Path, seconds: float) -> EngineSettings:
    return EngineSettings(
        model=model, kv_cache_bytes=2**22, tensor_parallel_size=2, step_timeout_seconds=seconds
    )


@given(looks=LOOKS, computes=st.booleans())
def test_a_rank_hangs_if_and_only_if_a_step_is_overdue(
    looks: list[tuple[float, bool, bool]], computes: bool
) -> None:
    """P4: an idle rank has no time limit, a computing one a longer limit; compared with a simple model."""
    watch, calls = EngineWatch(LivenessTimeouts(float("inf"), HUNG_SECONDS), 0.0), CallCount()
    now = moved_at = 0.0
    runtime = num_answered = 0
    limit = HUNG_SECONDS * (COMPUTING_FACTOR if computes else 1)
    watch.ran(runtime, now)
    watch.on_answer({RANK_CALLS: calls.look(num_answered, owes_step=False)}, now)
    for seconds, is_idle, answers in looks:
        now += seconds
        runtime += int(seconds * COMPUTED) if computes else 1
        num_answered += answers
        if is_idle or answers:
            moved_at = now
        watch.ran(runtime, now)
        watch.on_answer({RANK_CALLS: calls.look(num_answered, owes_step=not is_idle)}, now)
        assert (watch.complaint(now) is not None) is (now - moved_at >= limit)


@pytest.mark.slow
def test_a_call_that_hangs_ends_the_rank_by_name(tmp_path: Path) -> None:
    """P4: rank 1 runs but its call never returns; it ends long before rank_timeout_seconds."""
    executor = create_executor(settings(make_checkpoint(tmp_path), STEP_SECONDS))
    assert isinstance(executor, RanksExecutor)
    try:
        initialize_kv_cache(executor)
        executor.set_connector(HangingRanks())
        message = (
            r"rank 1 of 2 \(process \d+\) was killed by signal 9: its loop of calls has made no progress"
        )
        with pytest.raises(WorkerLostError, match=message):
            executor.execute_model(SchedulerOutput(kv_connector_metadata={"orders": []}))
    finally:
        executor.shutdown()


@pytest.mark.slow
async def test_a_hanging_data_thread_of_a_rank_ends_the_engine(tmp_path: Path) -> None:
    """P4: both ranks compute, but rank 1 never publishes what it has computed."""
    factory = StuckFactory(transfer_factory(Role.PREFILL, None, "tcp").settings)
    client = await ProcessClient.start(
        settings(make_checkpoint(tmp_path), DATA_SECONDS), Transfers(factory, STAGES)
    )
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        request = EngineRequest(
            request_id="r", prompt_token_ids=list(range(40)), sampling=sampling, transfer=SendTransfer("t")
        )
        outputs = [output async for output in client.generate(request)]
        assert outputs
        await client.died.wait()
        with pytest.raises(UnavailableError, match="its thread that publishes KV on rank 1 has made no"):
            await client.call("pid")
    finally:
        await client.shutdown()
