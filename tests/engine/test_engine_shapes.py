"""The engine on tiny random checkpoints: crowding, prefix caching, refusals."""

import random

import pytest


def test_preemption_right_after_the_prompt(start, oracle, expect, job, make_checkpoint) -> None:
    """The prompt comes again, in one chunk with a token that may exit: it needs every layer."""
    model = make_checkpoint("llama")
    numbers = random.Random(3)
    jobs = [
        # One block is just full, and the second is not there for all.
        job([numbers.randrange(2, 128) for _ in range(32)], {"exit_threshold": 0.05}, max_tokens=30)
        for _ in range(8)
    ]
    reference = oracle(model)
    expected = [expect(reference, one) for one in jobs]
    assert any(depths[1] < 6 for _, depths in expected)
    harness = start(
        model,
        enable_prefix_caching=False,
        block_size=32,
        num_gpu_blocks_override=12,
        max_model_len=128,
        max_num_seqs=8,
    )
    assert harness.run(jobs) == expected


def test_seeded_prompts_in_chunks(start, bundled) -> None:
    """Plain vLLM 0.32 on a CPU dies of the first such request."""
    from vllm import SamplingParams

    prompts = ["x = 1\n" * 30, "import os\n" * 25, "def f(a, b):\n    return a\n" * 8]
    params = [
        SamplingParams(max_tokens=16, temperature=1.0, seed=seed, extra_args=fields)
        for seed, fields in ((1, {}), (2, {"exit_threshold": 0.4}), (3, {"exit_layer": 6}))
    ]
    answers = []
    for options in ({"max_num_batched_tokens": 64}, {"enable_chunked_prefill": False}):
        engine = start(bundled, enable_prefix_caching=False, max_model_len=512, **options).engine
        outputs = engine.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].text for output in outputs])
    assert answers[0] == answers[1]


def test_prefix_cache_keeps_policies_apart(start, random_jobs, job, make_checkpoint) -> None:
    """Nobody reads what an early exit wrote but requests of the same policy."""
    harness = start(make_checkpoint("llama"), block_size=32, disable_log_stats=False)
    early = job(random_jobs()[0].prompt, {"exit_layer": 2}, max_tokens=100)
    ((said, _),) = harness.run([early])
    for fields in ({}, {"exit_layer": 4}, {"exit_threshold": 0.1}):
        follow_up = job(early.prompt + said, fields, max_tokens=16)
        hits = _cache_hits(harness)
        after_early = harness.run([follow_up])
        assert _cache_hits(harness) == hits
        harness.engine.reset_prefix_cache()
        assert harness.run([follow_up]) == after_early, "a fresh server says something else"
        harness.run([early])
    hits = _cache_hits(harness)
    harness.run([job(early.prompt + said, {"exit_layer": 2}, max_tokens=16)])
    assert _cache_hits(harness) > hits, "the same policy may share; else nothing was cached"


def _cache_hits(harness) -> int:
    return harness.counter("vllm:prefix_cache_hits")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({}, "sampling by ranks"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(make_checkpoint, options, message) -> None:
    """Checked on the config, before any process starts."""
    from vllm import EngineArgs

    from exitserve.engine.compat.config import refuse_unsupported
    from exitserve.engine.launch import engine_options

    model = make_checkpoint("llama")
    config = EngineArgs(
        model=str(model), **engine_options(model, {}), **options
    ).create_engine_config()
    # vLLM itself refuses it on runner V1.
    config.parallel_config.enable_batch_sharded_sampling = not options
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(config)


def test_new_weights_are_refused(start, make_checkpoint) -> None:
    """Copies of the old ones would propagate keys and values, and read exit rows."""
    with pytest.raises(RuntimeError, match="Start the engine again"):
        start(make_checkpoint("llama")).engine.collective_rpc("reload_weights")
