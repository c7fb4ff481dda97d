"""Write the fixtures of systems that are not installed here, field by field: python tests/formats/make_fixtures.py

Each function follows the code that writes the files, which the reader's docstring names. Ids and texts are invented.
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent / "fixtures"
ASKED = "You are in the kitchen. The mug is on the table."
SEEN = "You take the mug."
SAID = ("take mug", "put mug in sink")


def write(name: str, rows: list, folder: str) -> None:
    path = HERE / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def verl_agent() -> None:
    """Rows of two trajectories, balanced out of order, with one copy that filled the batch."""
    rng = np.random.default_rng(5)
    rows = []
    for uid, turns, reward in (("traj-a", 3, 10.0), ("traj-b", 2, 0.0)):
        for turn in range(turns):
            size = 3 + turn
            student, teacher = -rng.exponential(1, (2, size)).astype(np.float32)
            gaps = (teacher - student).astype(np.float32)
            rows.append(
                {
                    "global_step": 5,
                    "sample_idx": 0,
                    "turn_step": turn,
                    "traj_uid": uid,
                    "episode_reward": reward,
                    "episode_length": float(turns),
                    "seq_advantage": 0.7071 if reward else -0.7071,
                    "tokens": ["<", "take", "é", " mug", ">"][:size],
                    "token_ids": rng.integers(0, 150_000, size).tolist(),
                    "gaps": gaps.tolist(),
                    "teacher_log_probs": teacher.tolist(),
                    "student_log_probs": student.tolist(),
                    "token_advantages": rng.normal(size=size).astype(np.float32).tolist(),
                }
            )
    order = (3, 1, 0, 4, 2, 1)
    opsd = [rows[i] | {"sample_idx": place} for place, i in enumerate(order)]
    write("step_5.jsonl", opsd, "verl_agent")
    lacking = ("seq_advantage", "token_advantages")
    write("step_5.jsonl", [{k: v for k, v in row.items() if k not in lacking} for row in opsd], "verl_agent_sdar")


def verl() -> None:
    legacy = [
        {
            "input": ASKED,
            "output": said,
            "gts": "sink",
            "score": score,
            "step": 3,
            "acc": score > 0,
            "request_id": f"r{i}",
        }
        for i, (said, score) in enumerate(zip(SAID, (1.0, 0.0), strict=True))
    ]
    write("3.jsonl", legacy, "verl_legacy")
    v1 = [
        {"input": ASKED, "output": SAID[0], "gts": "sink", "score": 0.0, "step": 4, "uid": "a_b_0_0"},
        {"input": ASKED + SEEN, "output": SAID[1], "gts": "sink", "score": 1.0, "step": 4, "uid": "a_b_0_1"},
        {"input": ASKED, "output": "look", "gts": "sink", "score": 0.0, "step": 4, "uid": "a_b_1_0"},
    ]
    write("4.jsonl", v1, "verl_v1")


def chat() -> list[dict]:
    return [
        {"role": "system", "content": "Act."},
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "act", "arguments": '{"do": "take"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": SEEN},
        {"role": "assistant", "content": [{"type": "text", "text": SAID[1]}]},
    ]


def messages() -> None:
    rows = [
        {"id": "one", "messages": chat(), "reward": 1, "success": True, "seed": 3},
        {"id": "two", "messages": [*chat()[:2], {"role": "assistant", "content": "look"}], "reward": 0.25},
    ]
    write("chats.jsonl", rows, "messages")


def ms_swift() -> None:
    columns = {
        "step": ["7", "7"],
        "prompt": [ASKED, ASKED],
        "completion": list(SAID),
        "Accuracy": [1.0, 0.0],
        "Format": [0.5, None],
        "advantages": [0.5, -0.5],
        "entropy": [0.25, 0.125],
    }
    write("completions.jsonl", [columns, columns | {"step": ["8", "8"]}], "ms_swift")
    rows = [
        {"gen_step": 2, "prompt": ASKED, "completion": s, "reward": r} for s, r in zip(SAID, (1.0, 0.0), strict=True)
    ]
    write("completions.jsonl", rows, "ms_swift_rows")
    sample = {
        "messages": [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": SAID[0]},
            {"role": "user", "content": SEEN},
            {"role": "assistant", "content": SAID[1]},
        ],
        "prompt_id": "p0",
        "request_id": "r0",
        "response_token_ids": [[11, 12, 13, 90, 91], [14, 15]],
        "response_loss_mask": [[1, 1, 1, 0, 0], [1, 1]],
        "rollout_logprobs": [[-0.5, -0.25, -0.125], [-1.0, -2.0]],
        "finish_reason": "length",
        "teacher_prompt": "The mug belongs in the sink.",
    }
    write("samples.jsonl", [sample], "ms_swift_samples")


def roll() -> None:
    rlvr = {
        "id": ["q1", "q1"],
        "prompt": [ASKED, ASKED],
        "ground_truth": ["sink", "sink"],
        "tag": ["kitchen", "kitchen"],
        "responses": list(SAID),
        "scores": [1.0, 0.0],
        "sampling_params": ["{}", "{}"],
        "global_step": [6, 6],
    }
    write("rollout_dump_data.step_6.jsonl", [rlvr], "roll")
    trajectory = {
        "trajectory_id": "kitchen_0_0_2_1_4_9",
        "env_info": {"env_id": 1, "group_id": 2, "tag": "kitchen", "seed": 9, "episode_id": 4},
        "reward_info": {"episode_reward": 1.0, "step_rewards": [0.0, 1.0]},
        "failure_info": {"stop_reason": "FINISH"},
    }
    agentic = {
        "trajectory_data": [json.dumps(trajectory)],
        "messages": [json.dumps([chat()])],
        "tools": ["[]"],
        "exp_name": ["kitchen"],
        "global_step": [6],
    }
    write("rollout_dump_data.step_6.jsonl", [agentic], "roll_agentic")


def skyrl() -> None:
    common = {"input_prompt": f"<|user|>{ASKED}", "env_class": "kitchen", "env_extras": {"goal": "sink"}}
    rows = [
        common | {"output_response": SAID[1], "score": 1.0, "stop_reason": "stop", "data_source": "kitchen"},
        common
        | {"output_response": "look", "score": [0.0, 0.25, 0.5], "stop_reason": "length", "data_source": "kitchen"},
    ]
    write("kitchen.jsonl", rows, "skyrl/global_step_9_evals")
    write("aggregated_results.jsonl", [{"eval/kitchen/avg_score": 0.875}], "skyrl/global_step_9_evals")


if __name__ == "__main__":
    for make in (verl_agent, verl, messages, ms_swift, roll, skyrl):
        make()
