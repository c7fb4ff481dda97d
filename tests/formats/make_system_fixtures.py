"""Write the fixtures of systems that can be installed, with their own code: python make_system_fixtures.py NAME.

Run in an environment of the system's own; each function says what it needs. The tests read what is written and never
run this. Ids and texts are invented here, the form of the files is the system's.
"""

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent / "fixtures"
ASKED = "You are in the kitchen. The mug is on the table."
SEEN = "You take the mug."
SAID = ("take mug", "put mug in sink")


def verifiers() -> None:
    """verifiers==0.4.0: two episodes of a group through its graph of messages, the second with a rewritten history."""
    import verifiers.v1 as vf
    from verifiers.v1 import graph
    from verifiers.v1.episode import Episode, GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import Response, TurnTokens
    from verifiers.v1.utils.trace_store import write_episode

    def turn(trace, messages, prompt, spans, sampled, logprobs, said, finish="stop"):
        pending = graph.prepare_turn(trace, messages)
        tokens = TurnTokens(
            prompt_ids=prompt, completion_ids=sampled, completion_logprobs=logprobs, message_spans=spans
        )
        message = vf.AssistantMessage(**said)
        response = Response(id="r", created=0, model="policy", message=message, finish_reason=finish, tokens=tokens)
        node = pending.commit(response)
        trace.calls.append(vf.ModelCall(node=node, model="policy", finish_reason=finish))
        return message

    folder = HERE / "verifiers" / "step_3" / "train" / "effective"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traces.jsonl").unlink(missing_ok=True)
    for rollout, reward in enumerate((1.0, 0.0)):
        data = vf.TaskData(idx=7, name="sink", prompt=ASKED)
        task = TraceTask(type="Task", data=data, key="sink")
        trace = Trace(id=f"trace{rollout}", task=task, agent=AgentInfo(config=vf.AgentConfig(), name="solver"))
        system, user = vf.SystemMessage(content="Act."), vf.UserMessage(content=ASKED)
        first = [101, 5, 102, 11, 12, 13, 103]
        call = {"content": None, "tool_calls": [vf.ToolCall(id="c0", name="act", arguments='{"do": "take mug"}')]}
        answer = turn(trace, [system, user], first, [(1, 2), (3, 6)], [21, 22, 23], [-0.125, -0.5, -0.25], call)
        result = vf.ToolMessage(tool_call_id="c0", content=SEEN)
        second = [*first, 21, 22, 23, 104, 31, 32, 103]
        spans = [(1, 2), (3, 6), (7, 10), (11, 13)]
        done = {"content": SAID[1], "reasoning_content": "The sink is next."}
        turn(trace, [system, user, answer, result], second, spans, [24, 25], [-1.0, -0.0625], done, "length")
        if rollout:
            other = vf.UserMessage(content="So far: the mug is taken.")
            turn(
                trace, [system, other], [101, 5, 102, 41, 42, 103], [(1, 2), (3, 5)], [26], [-2.0], {"content": "stop"}
            )
        for node in trace.nodes:
            if node.sampled:
                n = sum(node.mask)
                node.advantages = [reward - 0.5] * n
                node.reference_logprobs = [value - 0.125 for value in node.logprobs]
                node.trainer_logprobs = [value + 0.0078125 for value in node.logprobs]
                node.entropies = [0.75] * n
        trace.record_reward("solved", reward, weight=1.0)
        trace.record_reward("format", 0.5, weight=0.25)
        trace.stop("agent_completed")
        trace.ok = True
        work = TrainWorkInfo(step=3, policy=PolicySpan(start=2, end=3))
        episode = Episode(
            id=f"episode{rollout}", env=vf.EnvInfo(id="kitchen"), task=task, group=GroupInfo(id="group7"),
            run=TrainRunInfo(id="run", work=work), ok=True, traces=[trace],
        )  # fmt: skip
        write_episode(folder, episode)


def verifiers_legacy() -> None:
    """verifiers==0.1.14: one rollout with its trajectory and one without."""
    from verifiers.types import State
    from verifiers.utils.save_utils import save_outputs, state_to_output

    user, first = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID[0]}
    told, second = {"role": "user", "content": SEEN}, {"role": "assistant", "content": SAID[1]}

    def tokens(prompt, sampled, mask, logprobs):
        return {
            "prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": sampled, "completion_mask": mask,
            "completion_logprobs": logprobs, "overlong_prompt": False, "is_truncated": False, "routed_experts": None,
        }  # fmt: skip

    steps = [
        ([user], [first], tokens([1, 2, 3], [21, 22], [1, 1], [-0.125, -0.5])),
        ([user, first, told], [second], tokens([1, 2, 3, 21, 22, 4], [23, 24, 9], [1, 1, 0], [-0.25, -1.0, -3.0])),
    ]
    trajectory = [
        {"prompt": p, "completion": c, "response": {}, "tokens": t, "reward": r, "advantage": a, "is_truncated": False,
         "trajectory_id": "t0", "extras": {}}
        for (p, c, t), r, a in zip(steps, (0.0, 1.0), (0.25, 0.75), strict=True)
    ]  # fmt: skip
    outputs = []
    for reward, columns in ((1.0, ["trajectory"]), (0.0, [])):
        state = State(
            example_id=4, prompt=[user], completion=[first, told, second], task="kitchen", reward=reward,
            timing={"generation_ms": 1.0, "scoring_ms": 1.0, "total_ms": 2.0}, is_completed=True, is_truncated=False,
            stop_condition="max_turns_reached", metrics={"solved": reward}, trajectory=trajectory,
        )  # fmt: skip
        outputs.append(state_to_output(state, columns))
    save_outputs(outputs, HERE / "verifiers_legacy")


def inspect_ai() -> None:
    """inspect_ai==0.3.285: two epochs of a tool-using task against its mock model, log-probs on the second call.

    Run outside of any git checkout, which the log would name.
    """
    from inspect_ai import Task, eval, task
    from inspect_ai.dataset import Sample
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        Logprob,
        Logprobs,
        ModelOutput,
        ModelUsage,
        get_model,
    )  # fmt: skip
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def act():
        async def execute(do: str) -> str:
            """Act in the kitchen.

            Args:
                do: What to do.
            """
            return SEEN

        return execute

    @task
    def kitchen():
        sample = Sample(input=ASKED, target="put mug in sink", id="sink")
        return Task(dataset=[sample], solver=[use_tools(act()), generate()], scorer=includes(), epochs=2)

    used = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)

    def outputs():
        for said in (SAID[1], "look"):
            asked = ModelOutput.for_tool_call("mockllm/model", "act", {"do": SAID[0]})
            asked.usage = used  # else tokens are counted, which asks for a tokenizer from the network
            yield asked
            pieces = [
                Logprob(token=piece, logprob=value)
                for piece, value in zip((said[:3], said[3:]), (-0.5, -0.25), strict=True)
            ]
            message = ChatMessageAssistant(content=said, source="generate")
            choice = ChatCompletionChoice(message=message, stop_reason="stop", logprobs=Logprobs(content=pieces))
            yield ModelOutput(model="mockllm/model", choices=[choice], usage=used)

    folder = HERE / "inspect_ai"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.eval"):
        old.unlink()
    model = get_model("mockllm/model", custom_outputs=outputs())
    log = eval(kitchen(), model=model, log_dir=str(folder), display="none", max_samples=1, log_samples=True)[0]
    Path(log.location.removeprefix("file://")).rename(folder / "kitchen.eval")


def art() -> None:
    """openpipe-art==0.5.18 without its other dependencies, with litellm, openai, pydantic, pyarrow and pyyaml.

    Importing the whole package needs a training stack; only its logging module and what that needs are loaded here.
    """
    root = Path(find_spec("art").submodule_search_locations[0])
    for name, folder in (("art", root), ("art.utils", root / "utils")):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    from art.trajectories import Trajectory, TrajectoryGroup
    from art.utils.trajectory_logging import write_trajectory_groups_parquet
    from art.utils.trajectory_migration import serialize_trajectory_groups
    from openai.types.chat.chat_completion import Choice

    def choice(said, finish="stop", **more):
        message = {"role": "assistant", "content": said} | more
        return Choice(finish_reason=finish, index=0, message=message)

    call = {"id": "c0", "type": "function", "function": {"name": "act", "arguments": '{"do": "take mug"}'}}
    groups = []
    for g in range(2):
        trajectories = []
        for reward in (1.0, 0.0):
            said = [
                {"role": "system", "content": "Act."},
                {"role": "user", "content": "Example."},
                {"role": "assistant", "content": "An example answer."},
                {"role": "user", "content": ASKED},
                choice(None, "tool_calls", tool_calls=[call]),
                {"role": "tool", "tool_call_id": "c0", "content": SEEN},
                choice(SAID[1] if reward else "look", "stop" if reward else "length"),
            ]
            trajectories.append(
                Trajectory(messages_and_choices=said, reward=reward, metrics={"solved": reward},
                           metadata={"scenario_id": f"sink{g}"}, logs=["done"])
            )  # fmt: skip
        groups.append(TrajectoryGroup(trajectories))
    folder = HERE / "art" / "trajectories" / "train"
    folder.mkdir(parents=True, exist_ok=True)
    write_trajectory_groups_parquet(groups, folder / "0012.parquet")
    (HERE / "art_jsonl").mkdir(exist_ok=True)
    (HERE / "art_jsonl" / "0012.jsonl").write_text(serialize_trajectory_groups(groups))


def agent_lightning() -> None:
    """agentlightning==1.0.2 without its other dependencies, with pydantic, httpx, httpx-retries, fastapi and numpy.

    Its adapter imports verl and tensordict for the batches it makes, which are not made here: they are stood in for.
    """
    for name, what in (("verl", "DataProto"), ("tensordict", "TensorDict"), ("torch", "Tensor")):
        module = types.ModuleType(name)
        setattr(module, what, object)
        sys.modules.setdefault(name, module)
    from agentlightning.schemas import Event
    from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
    from agentlightning.verl.rollout_adapter import _build_compact_rollout_trajectory_records, _build_zipped_jsonl

    class Words:
        def decode(self, ids, skip_special_tokens=False):
            return " ".join(f"w{i}" for i in ids)

    def response(said, prompt, sampled, logprobs, finish="stop"):
        content = [{"token": f"w{i}", "logprob": p} for i, p in zip(sampled, logprobs, strict=True)]
        choice = {
            "index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": finish,
            "logprobs": {"content": content}, "token_ids": sampled,
        }  # fmt: skip
        return {"object": "chat.completion", "model": "policy", "choices": [choice], "prompt_token_ids": prompt}

    asked = [{"role": "user", "content": ASKED}]
    later = [*asked, {"role": "assistant", "content": SAID[0]}, {"role": "user", "content": SEEN}]
    calls = [
        (asked, response("lost", [1, 2, 3], [20], [-2.0]), "ok"),
        (asked, response(SAID[0], [1, 2, 3], [21, 22], [-0.125, -0.5]), "ok"),
        (later, {"error": {"message": "no room"}}, "error"),
        (later, response(SAID[1], [1, 2, 3, 21, 22, 4], [23, 24], [-0.25, -1.0], "length"), "ok"),
    ]
    folder = HERE / "agent_lightning" / "step_5"
    folder.mkdir(parents=True, exist_ok=True)
    events, rollouts = [], []
    for rollout, reward in (("rollout0", 1.0), ("rollout1", 0.0)):
        own = {"rollout_id": rollout, "attempt_id": "0", "timestamp": 0.0}
        for messages, answer, status in calls:
            data = {
                "model": "policy", "model_version": 5, "request": {"messages": messages}, "response": answer,
                "status": status, "http_status": 200 if status == "ok" else 500,
            }  # fmt: skip
            events.append(Event(event_type="model_request", data=data, **own))
        events.append(Event(event_type="note", data={"text": "played"}, **own))
        events.append(Event(event_type="reward", data={"value": reward, "source": "agent"}, **own))
        triplets = [
            Triplet(prompt={"token_ids": a["prompt_token_ids"]}, response={"token_ids": a["choices"][0]["token_ids"]})
            for _, a, status in calls
            if status == "ok"
        ]
        rollouts.append(
            CompletedRollout(
                rollout_id=rollout,
                data_id="sink",
                step=5,
                sample_idx_in_step=0,
                enqueue_time=0.0,
                final_reward=reward,
                triplets=triplets,
            )  # fmt: skip
        )
    lines = "".join(event.model_dump_json() + "\n" for event in events)
    (HERE / "agent_lightning_events").mkdir(exist_ok=True)
    (HERE / "agent_lightning_events" / "events.jsonl").write_text(lines)
    listed = json.dumps([event.model_dump(mode="json") for event in events])
    (HERE / "agent_lightning_events" / "events.json").write_text(listed)
    records = _build_compact_rollout_trajectory_records(rollouts, tokenizer=Words(), reward_fillna_value=0.0)
    zipped = _build_zipped_jsonl(records, "train_trajectories.jsonl")
    (folder / "train_trajectories.jsonl.zip").write_bytes(zipped)


if __name__ == "__main__":
    names = {f.__name__: f for f in (verifiers, verifiers_legacy, inspect_ai, art, agent_lightning)}
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.exit(f"name one of: {', '.join(names)}")
    names[sys.argv[1]]()
