"""A small made-up run with the tables of a real one, for tests of figures. Every number comes from one seed."""

import numpy as np
import polars as pl

ROOMS = ("kitchen", "pantry", "laundry room", "bathroom")
THINGS = ("dirty plate", "red apple", "wet towel", "clean fork", "milk carton")
PLACES = ("dishwasher", "fridge", "washing machine", "cutlery drawer", "counter")


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _episode(rng, step, episode, group, n_steps, teacher):
    """One episode of up to 6 turns: outcome, and its turns with token lists."""
    thing, place = THINGS[group % 5], PLACES[group % 5]
    skill = 0.2 + 0.6 * step / n_steps
    won = bool(rng.random() < skill)
    n_turns = int(rng.integers(3, 6)) if won else 6
    key = int(rng.integers(1, n_turns - 1))
    rows = []
    for k in range(n_turns):
        if won and k == n_turns - 1:
            action = f"put {thing} in {place}"
        elif won and k == key:
            action = f"take {thing}"
        else:
            action = str(
                rng.choice(["look around", f"open {rng.choice(PLACES)}", f"take {rng.choice(THINGS)}", "inventory"])
            )
        pieces = [w if i == 0 else " " + w for i, w in enumerate(action.split())] + ["<|end|>"]
        n = len(pieces)
        old = -np.abs(rng.normal(0.4, 0.5, n)) - 0.01
        good = won and k in (key, n_turns - 1)
        gap = rng.normal(-0.05, 0.15, n) + (rng.random(n) < 0.5) * (0.7 if good else (-0.5 if not won else 0.0))
        gap = np.minimum(gap, -old - 1e-3)
        rows.append(
            dict(
                step=step,
                episode=episode,
                group=group,
                turn=k,
                observation=f"You are in the {rng.choice(ROOMS)}. You see: a {thing}, a {place}, "
                f"a {rng.choice(THINGS)}. Your task is to tidy up: the {thing} belongs in the {place}.",
                action=action,
                response="".join(pieces),
                valid=bool(rng.random() > 0.05),
                truncated=False,
                reward=float(won and k == n_turns - 1),
                token_ids=[int(i) for i in rng.integers(4, 900, n)],
                pieces=pieces,
                old_logprobs=old.tolist(),
                entropy=np.abs(rng.normal(0.6, 0.3, n)).tolist(),
                teacher_logprobs=(old + gap).tolist() if teacher else None,
                gap=gap.tolist() if teacher else None,
            )
        )
    head = dict(
        step=step,
        episode=episode,
        group=group,
        task=f"twc/train/{group}",
        kind=place,
        split="train",
        seed=group,
        outcome=int(won),
        n_turns=n_turns,
        n_tokens=sum(len(r["pieces"]) for r in rows),
        stop_reason="won" if won else "max_turns",
    )
    return head | {"return": float(won)}, rows


def _credit(head, rows, gamma=0.95, lam=0.5, band=0.2, eps=1e-4):
    """AgentOPSD's recursion over one episode, as in the paper; the tests compare the library with it."""
    e = np.array([sum(r["gap"]) for r in rows])
    logit, c, before = np.log(head["prior"] / (1 - head["prior"])), 0.0, head["prior"]
    beliefs = []
    for value in e:
        c = gamma * c + value
        beliefs.append(_sigmoid(logit + c))
    revision = np.diff([before, *beliefs])
    q = np.sign(head["advantage"]) * revision
    z = (q - q.mean()) / (q.std() + eps)
    weight = np.clip(1 + band * z, 1 - band, 1 + band)
    for k, row in enumerate(rows):
        advantage = float(head["advantage"] * (1 - lam + lam * weight[k]))
        row.update(
            evidence=float(e[k]),
            belief_before=float(before),
            belief=float(beliefs[k]),
            revision=float(revision[k]),
            z=float(z[k]),
            weight=float(weight[k]),
            turn_advantage=advantage,
            pivotal=bool(abs(z[k]) > 1),
            gate=_sigmoid(5 * np.array(row["gap"])).tolist(),
        )
        before = beliefs[k]
        row["advantage"] = [advantage] * len(row["pieces"])
        row["dloss_dlogp"] = [-advantage - 0.01 * g for g in row["gate"]]


def tables(seed=0, n_steps=8, groups=3, size=6, teacher=True, gate=True, tied=True):
    """The tables of a run as {name: DataFrame}. teacher=False leaves out all that GRPO does not have."""
    rng = np.random.default_rng(seed)
    episodes, turns, steps, updates, modules, evals = [], [], [], [], [], []
    update, window, previous = 0, [], None
    for step in range(1, n_steps + 1):
        heads, played = [], []
        for i in range(groups * size):
            head, rows = _episode(rng, step, i, i // size, n_steps, teacher)
            heads.append(head), played.append(rows)
        for g in range(groups):
            wins = np.array([h["outcome"] for h in heads if h["group"] == g], float)
            for head in (h for h in heads if h["group"] == g):
                head["prior"] = float(np.clip(wins.mean(), 1e-4, 1 - 1e-4))
                head["advantage"] = (
                    float((head["outcome"] - wins.mean()) / (wins.std(ddof=1) + 1e-6)) if wins.std() else 0.0
                )
        for head, rows in zip(heads, played, strict=True):
            if teacher:
                _credit(head, rows)
            else:
                for row in rows:
                    row.update(
                        gate=None,
                        evidence=None,
                        belief_before=None,
                        belief=None,
                        revision=None,
                        z=None,
                        weight=None,
                        turn_advantage=head["advantage"],
                        pivotal=None,
                        advantage=[head["advantage"]] * len(row["pieces"]),
                        dloss_dlogp=[-head["advantage"]] * len(row["pieces"]),
                    )
            turns += rows
        episodes += heads
        applied = discarded = 0
        for reuse in range(1, 5):
            update += 1
            energy = float(np.exp(rng.normal(-1, 0.25) + 0.5 * (reuse - 1) * (rng.random() < 0.5)))
            increment = None if previous is None else energy - previous
            previous, z = energy, None
            if gate and len(window) == 8 and increment is not None:
                z = (increment - np.mean(window)) / (np.std(window) + 1e-8)
            stop = bool(z is not None and reuse > 1 and z > 1.0)
            updates.append(
                dict(
                    step=step,
                    update=update,
                    reuse=reuse,
                    applied=not stop,
                    stop=stop,
                    energy=energy,
                    head_norm=energy**0.5,
                    increment=increment,
                    z=z,
                    threshold=1.0 if gate else None,
                    loss=rng.normal(0, 0.02),
                    kl=0.002 * reuse,
                    chi2=0.01 * reuse,
                    clip_fraction=0.03 * reuse,
                    grad_norm=0.8 + rng.random(),
                )
            )
            if stop:
                discarded += 1
                break
            applied += 1
            window = ([*window, increment] if increment is not None else window)[-8:]
            names = (
                [("model.embed_tokens", -1, 64000)]
                + [
                    (f"model.layers.{n}.{m}", n, 16000)
                    for n in range(4)
                    for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
                ]
                + [("model.norm", 4, 128), ("lm_head", 4, 64000)]
            )
            for name, layer, params in names:
                head = name == "lm_head"
                change = float(np.exp(rng.normal(-6.2 + 0.08 * layer, 0.1)) * (2.0 + 0.5 * reuse if head else 1))
                modules.append(
                    dict(
                        step=step,
                        update=update,
                        reuse=reuse,
                        module=name,
                        layer=layer,
                        is_head=head,
                        tied=tied and head,
                        params=params,
                        relative_change=change,
                        cumulative_change=change * update**0.5,
                        grad_norm=rng.random(),
                    )
                )
        mine = [r for r in turns if r["step"] == step]
        gaps = np.concatenate([r["gap"] for r in mine]) if teacher else None
        steps.append(
            dict(
                step=step,
                n_episodes=len(heads),
                n_groups=groups,
                n_mixed_groups=sum(len({h["outcome"] for h in heads if h["group"] == g}) > 1 for g in range(groups)),
                success=float(np.mean([h["outcome"] for h in heads])),
                loss=rng.normal(0, 0.02),
                pg_loss=rng.normal(0, 0.02),
                kl=0.004 * step,
                entropy=0.9 - 0.03 * step,
                aux_loss=0.01 if teacher else None,
                grad_norm=1 + rng.random(),
                clip_fraction=0.05,
                updates=applied,
                discarded=discarded,
                invalid_rate=0.05,
                turns_mean=5.0,
                lr=5e-4,
                gap_mean=float(gaps.mean()) if teacher else None,
                gap_std=float(gaps.std()) if teacher else None,
                gate_mean=float(_sigmoid(5 * gaps).mean()) if teacher else None,
                gate_active=float((gaps > 0).mean()) if teacher else None,
                advantage_std=0.9,
                zero_advantage_share=0.1,
            )
        )
        if step in (1, n_steps // 2, n_steps):
            for panel, shift in (("heldout", 0.0), ("unseen", -0.25)):
                for role in ("student", "teacher") if step in (1, n_steps) else ("student",):
                    p = np.clip(0.28 + 0.4 * step / n_steps + shift + (0.15 if role == "teacher" else 0), 0.02, 0.98)
                    for t in range(48):
                        won = int(rng.random() < p)
                        evals.append(
                            {
                                "step": step,
                                "panel": panel,
                                "role": role,
                                "task": f"{panel}/{t}",
                                "kind": PLACES[t % 5],
                                "seed": t,
                                "episode": t,
                                "outcome": won,
                                "return": float(won),
                                "n_turns": 5,
                                "stop_reason": "won",
                                "invalid": 0,
                            }
                        )
    rows = dict(episodes=episodes, turns=turns, steps=steps, updates=updates, modules=modules, evals=evals)
    return {name: pl.DataFrame(r, infer_schema_length=None) for name, r in rows.items()}


def write(out, experiment="train", method="agent_opsd", **options):
    """The same tables as a run folder on disk; returns the RunFolder."""
    from workbench.runs import RunFolder

    run = RunFolder.create(out, experiment, {"method": method, "seed": options.get("seed", 0)})
    for name, frame in tables(**options).items():
        for step, part in frame.group_by("step", maintain_order=True):
            run.write_table(name, step[0], part)
    run.complete()
    return run
