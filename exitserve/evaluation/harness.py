"""Generative tasks of EleutherAI's lm-eval against a running server, with the depth of every token.

Each request carries its exit fields, so one server serves all settings. Responses tell the depth at
which each token stopped (`exit_trace`), which is kept beside the score.

Tasks that compare log-likelihoods of given answers are refused: they generate nothing, and prompts
run at full depth, so no threshold would change their score.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from exitserve.errors import ExitServeError, nearest
from exitserve.evaluation.endpoint import Endpoint
from exitserve.evaluation.settings import EvalSetting, TaskJob

GENERATIVE = "generate_until"
SEED = 1234
"""lm-eval's default, for few-shot examples and sampling."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Score of one task under one setting."""

    task: str
    samples: int
    metrics: Mapping[str, dict[str, Any]]
    """"metric,filter" to `value`, `stderr`, `higher_is_better`; the first is the task's own."""
    depths: Sequence[int]
    """Depth of each decode token; an answer's first token, always at full depth, is left out."""


class ExitCompletions(LocalCompletionsAPI):  # type: ignore[misc]
    """lm-eval's client of a completions server; also sends exit fields and collects depths."""

    def __init__(self, endpoint: Endpoint, tokenizer: str, job: TaskJob) -> None:
        """Connects to a server.

        Args:
            endpoint: the server.
            tokenizer: directory of the checkpoint.
            job: concurrency, chat.
        """
        super().__init__(
            base_url=f"{endpoint.url}/v1/completions",
            model=endpoint.name,
            tokenizer=tokenizer,
            tokenizer_backend="huggingface",
            # As the server encodes prompts; a chat template has special tokens of its own.
            add_bos_token=not job.chat,
            # lm-eval subtracts one for a generated token, which max_gen_toks counts again.
            max_length=endpoint.context + 1,
            num_concurrent=job.concurrency,
            max_retries=1,
            seed=SEED,
        )
        self.fields: dict[str, Any] = {}
        self.depths: list[int] = []

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(*args, **kwargs)
        return payload | {"vllm_xargs": {**self.fields, "exit_trace": True}}

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """Returns the texts of the answers, and collects their depths."""
        for output in outputs if isinstance(outputs, list) else [outputs]:
            for choice in output["choices"]:
                self.depths += (choice["exit_layers"] or [])[1:]
        texts: list[str] = super().parse_generations(outputs, **kwargs)
        return texts


def load_tasks(job: TaskJob) -> dict[str, Any]:
    """lm-eval's tasks by name; a group gives its members.

    Relative paths of data files start at the folder of `--task-path`.

    Raises:
        ExitServeError: a task is unknown, cannot be loaded, or generates nothing.
    """
    if job.path is not None and not job.path.is_dir():
        raise ExitServeError(
            f"--task-path '{job.path}' is not a folder; give the one with your tasks."
        )
    manager = _manager(job)
    for name in job.names:
        if name not in manager.task_index:
            raise ExitServeError(
                f"task {name!r} is unknown to lm-eval.{nearest(name, manager.all_tasks)} Tasks of "
                f"your own go into a folder given with --task-path."
            )
    tasks: dict[str, Any] = {}
    for name in job.names:
        with contextlib.chdir(job.path or Path.cwd()):
            tasks |= _load(manager, name)
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != GENERATIVE:
            raise ExitServeError(
                f"task {name!r} compares likelihoods of given answers ({task.OUTPUT_TYPE}), so "
                f"nothing is generated and nothing can exit: its score is the same at every "
                f"threshold. Give generative tasks (output_type: {GENERATIVE})."
            )
    return tasks


def _manager(job: TaskJob) -> TaskManager:
    """Finds tasks: in the given folder alone if that is enough, since lm-eval has thousands."""
    if job.path is not None:
        own = TaskManager(include_path=str(job.path.resolve()), include_defaults=False)
        # A group in the folder may name tasks of lm-eval.
        if set(job.names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=None if job.path is None else str(job.path.resolve()))


def _load(manager: TaskManager, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = manager.load([name])["tasks"]
    except Exception as error:  # a task runs code of its own and of `datasets`
        reason = " ".join(str(error).split())[:300]
        raise ExitServeError(
            f"task {name!r} cannot be loaded ({type(error).__name__}: {reason}); without access "
            f"to a hub its data files must be local (dataset_path: json, data_files)."
        ) from error
    return found


def run_tasks(
    tasks: Mapping[str, Any],
    settings: Sequence[EvalSetting],
    job: TaskJob,
    endpoint: Endpoint,
    tokenizer: str,
) -> Iterator[tuple[EvalSetting, TaskScore]]:
    """Runs every task under every setting, and yields each score once it is known.

    Raises:
        ExitServeError: answers of a task do not fit the context, the server fails, or lm-eval
            refuses the task.
    """
    client = ExitCompletions(endpoint, tokenizer, job)
    for name, task in tasks.items():
        _prepare(task, endpoint)
        for setting in settings:
            client.fields, client.depths = dict(setting.fields), []
            with _one_line_errors(name, endpoint):
                found = evaluate(
                    lm=client,
                    task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
                    limit=job.limit,
                    log_samples=False,
                    apply_chat_template=job.chat,
                )
            yield setting, _score_of(name, found, client.depths)


def _prepare(task: Any, endpoint: Endpoint) -> None:
    """Prepares a task as lm-eval's command does, and checks that its answers fit the context."""
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)
    answer = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", 256)
    if answer >= endpoint.context:
        raise ExitServeError(
            f"task {task.task_name!r} asks for {answer} tokens, but the server's context is "
            f"{endpoint.context}: lower max_gen_toks in its generation_kwargs."
        )


@contextlib.contextmanager
def _one_line_errors(name: str, endpoint: Endpoint) -> Iterator[None]:
    try:
        yield
    except (requests.RequestException, aiohttp.ClientError, TimeoutError) as error:
        raise ExitServeError(
            f"the server at {endpoint.url} failed during task {name!r}: {error or 'no answer'}."
        ) from error
    except ValueError as error:
        # lm-eval refuses tasks this way, such as those that run generated code.
        raise ExitServeError(f"lm-eval refuses task {name!r}: {error}") from error


def _score_of(name: str, found: Mapping[str, Any], depths: Sequence[int]) -> TaskScore:
    results, better = found["results"][name], found["higher_is_better"][name]
    metrics = {}
    for key, value in results.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        spread = results.get(f"{metric}_stderr,{chosen}")
        metrics[key] = {
            "value": float(value),
            "stderr": float(spread) if isinstance(spread, int | float) else None,
            "higher_is_better": better.get(metric) is not False,
        }
    if not metrics:
        raise ExitServeError(f"task {name!r} has no metric that is a number.")
    return TaskScore(
        task=name,
        samples=found["n-samples"][name]["effective"],
        metrics=metrics,
        depths=tuple(depths),
    )
