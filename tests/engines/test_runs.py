"""Runs under TRL: resumed, evaluated, launched from the command line, read by what reads our own; options refused."""

import argparse
import re
from pathlib import Path

import pytest
import torch
from polars.testing import assert_frame_equal
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

pytest.importorskip("trl", reason="TRL is not installed here; `make crosscheck` installs it")

from engine_cases import GAME, GATED, RUN, Parity, adam_steps, credit_trainer, ours, prepare, trl_args, weights_of  # noqa: E402

from workbench.audit import audit  # noqa: E402
from workbench.config import from_mapping  # noqa: E402
from workbench.engines import launch  # noqa: E402
from workbench.engines.options import LOSS_TYPES, check_engine, check_method, fitted, trl_loss  # noqa: E402
from workbench.engines.play import PlayConfig, teacher_of  # noqa: E402
from workbench.engines.trl import CreditTrainer  # noqa: E402
from workbench.envs.base import EnvBatch  # noqa: E402
from workbench.errors import WorkbenchError  # noqa: E402
from workbench.methods import METHODS, method  # noqa: E402
from workbench.records import Batch  # noqa: E402
from workbench.report import build_report  # noqa: E402
from workbench.runs import RunFolder  # noqa: E402
from workbench.share import explorable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    prepare(path, tokenizer)
    return path


def test_a_resumed_run_is_the_unbroken_one(folder):
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = credit_trainer(folder, "agent_opsd", 4, args=saving | {"output_dir": folder / "whole"})
    whole.train()
    resumed = credit_trainer(folder, "agent_opsd", 4, args=saving | {"output_dir": folder / "whole"})
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert resumed.number == whole.number == 4 and resumed.updates == 4
    for key, value in weights_of(whole.bare).items():
        assert torch.equal(weights_of(resumed.bare)[key], value), key
    for table in ("steps", "updates", "modules", "episodes", "turns"):
        after = whole.folder.read(table).filter(whole.folder.read(table)["step"] >= 2)
        assert_frame_equal(resumed.folder.read(table), after)


def test_a_gate_is_resumed_and_a_batch_in_use_is_played_anew(folder):
    saving = {"save_strategy": "steps", "save_steps": 3, "output_dir": folder / "gated"}
    whole = credit_trainer(folder, "grpo_dgg", 3, args=saving, **GATED)
    whole.train()
    assert whole.step.used == 3 < GATED["max_reuse"] and whole.folder.read("updates").height == 3
    resumed = credit_trainer(folder, "grpo_dgg", 6, args=saving, **GATED)
    kept = []
    load = resumed._load_optimizer_and_scheduler
    resumed._load_optimizer_and_scheduler = lambda c: (load(c), kept.append(resumed.gate.state_dict()))
    resumed.train(resume_from_checkpoint=str(folder / "gated" / "checkpoint-3"))
    assert kept == [whole.gate.state_dict()] and kept[0]["window"]
    updates = resumed.folder.read("updates")
    assert updates.select("step", "update", "reuse").rows()[:2] == [(0, 3, 1), (0, 4, 2)]
    applied = whole.folder.read("updates")["applied"].sum() + updates["applied"].sum()
    assert set(adam_steps(resumed.optimizer)) == {float(applied)}


def test_a_checkpoint_of_another_trainer_is_refused(folder):
    saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": folder / "other"}
    credit_trainer(folder, "grpo", 1, args=saving).train()
    (folder / "other" / "checkpoint-1" / "credit.pt").unlink()
    with pytest.raises(WorkbenchError, match="no checkpoint of a CreditTrainer"):
        credit_trainer(folder, "grpo", 2, args=saving).train(resume_from_checkpoint=True)


def test_evaluation_plays_the_games_of_our_panel(folder):
    trainer = credit_trainer(
        folder, "agent_opsd", 1, args={"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True,
                                       "per_device_eval_batch_size": 8},
    )  # fmt: skip
    trainer.train()
    evals = trainer.folder.read("evals")
    assert evals.group_by("step", "role").len().sort("step", "role").rows() == [
        (0, "student", 2), (0, "teacher", 2), (1, "student", 2), (1, "teacher", 2),
    ]  # fmt: skip
    mine = ours(folder, "agent_opsd", 1)
    mine._evaluate()
    theirs = mine.folder.read("evals").filter(mine.folder.read("evals")["panel"] == "heldout")
    first = evals.filter(evals["step"] == 0)
    columns = ["role", "task", "outcome", "n_turns"]
    assert_frame_equal(first.select(columns), theirs.select(columns), check_row_order=False)
    assert [log["eval_success"] for log in trainer.state.log_history if "eval_success" in log]


def test_the_engines_own_generation_in_one_process_on_given_games(folder):
    games = EnvBatch([Parity() for _ in range(3)])
    trainer = credit_trainer(folder, "agent_opsd", 1, args={"sampler": "engine"}, env=games)
    trainer.train()
    with pytest.raises(WorkbenchError, match="set skills to a folder"):
        teacher_of(games, PlayConfig(), trainer.chat)
    batch = trainer.step.batch
    assert batch.sampled_logprobs is None and (batch.old_logprobs[batch.response_mask] < 0).all()
    assert batch.turn_tokens.max() <= GAME["max_response_tokens"] and batch.turn_counts.eq(3).all()
    row = trainer.step.updates[0]
    assert row["ratio_max"] == pytest.approx(1, abs=1e-4) and row["grad_norm"] > 0
    turns = trainer.folder.read("turns")
    assert (turns["truncated"] == (turns["token_ids"].list.last() != 2)).all()


def test_an_engine_that_tells_its_logprobs_is_weighed(folder):
    """dora: pi_old / pi_sampled, capped, where the engine's log-probs are not those of the one that trains."""

    class Telling(CreditTrainer):
        def _generate_single_turn(self, *args):
            ids, _ = super()._generate_single_turn(*args)
            return ids, [[-9.0] * (len(row) - 1) + [-0.01] for row in ids]

    args = {"sampler": "engine", "vllm_importance_sampling_correction": False}
    trainer = credit_trainer(folder, "dora", 1, kind=Telling, args=args)
    trainer.train()
    step, mask = trainer.step, trainer.step.batch.response_mask
    sampled, old = step.batch.sampled_logprobs[mask], step.batch.old_logprobs[mask]
    assert not trainer.by_trl and sampled.unique().tolist() == pytest.approx([-9.0, -0.01])
    weight = (old - sampled).exp().clamp(max=2.0)
    assert weight.min() < 0.9 and weight.max() == 2
    torch.testing.assert_close(step.advantages[mask], step.credit.advantages[mask] * weight)
    assert "sampled_logprobs" in trainer.folder.read("turns").columns


def test_adapters_are_trained_and_the_student_may_read_the_skills(folder):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"])
    trainer = credit_trainer(folder, "skill_grpo", 1, peft_config=adapters)
    trainer.train()
    step, skill = trainer.step, trainer.processing_class.encode("put the red cup on table", add_special_tokens=False)
    first = step.episodes[0].turns[0].prompt_ids.tolist()
    assert any(first[i : i + len(skill)] == skill for i in range(len(first)))
    assert step.batch.teacher_logprobs is None and step.updates[0]["grad_norm"] > 0
    assert step.updates[0]["ratio_max"] == pytest.approx(1, abs=1e-4) and step.updates[0]["energy"] is None
    with pytest.raises(WorkbenchError, match="frozen"):
        credit_trainer(folder, "grpo_dgg", 1, peft_config=adapters)


def test_adapters_are_compared_with_the_model_without_them(folder):
    """The KL is to the weights without adapters; old log-probs are those with."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"])
    trainer = credit_trainer(folder, "grpo", 3, args={"beta": 0.05}, peft_config=adapters)
    trainer.train()
    updates = trainer.folder.read("updates")
    assert updates["kl_reference"][0] == pytest.approx(0, abs=1e-7) and updates["kl_reference"][2] > 1e-4
    assert updates["ratio_max"].to_list() == pytest.approx([1.0] * 3, abs=1e-4)


def test_launched_from_a_command_line_and_resumed(folder, capsys, monkeypatch):
    asked = [
        "--method", "sdar", "--env", "parity", "--model", str(folder / "model"), "--out", str(folder / "out"),
        "options.coef=0.2", f"play.skills={folder / 'skills'}", *(f"play.{k}={v}" for k, v in GAME.items()),
        *(f"grpo.{k}={v}" for k, v in {
            "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "use_cpu": "true", "bf16": "false",
            "save_strategy": "steps", "save_steps": 1, "seed": RUN["seed"], "learning_rate": 0.01,
            "gradient_checkpointing": "false",
        }.items()),
    ]  # fmt: skip
    end, torn = CreditTrainer.end_step, []

    def break_once(self):
        if self.number == 1 and not torn:
            torn.append(RunFolder(self.folder.path))
            raise RuntimeError("the node went away")
        end(self)

    monkeypatch.setattr(CreditTrainer, "end_step", break_once)
    with pytest.raises(RuntimeError):
        launch.main(asked)
    assert torn[0].state == "failed" and torn[0].manifest["error"] == "the node went away"
    run = launch.main(["--resume", str(torn[0].path)])
    assert run.path == torn[0].path and run.read("steps")["step"].to_list() == [0, 1]
    assert re.search(r"step 2  success 0\.\d\d", capsys.readouterr().out)
    run = RunFolder.open(run.path)
    assert run.state == "complete" and run.config["method_options"] == {"coef": 0.2}
    assert run.manifest["result"] == {"method": "sdar", "seed": 3, "steps": 2, "updates": 2}
    assert run.read("steps")["aux_loss"].null_count() == 0
    assert explorable(run) and build_report(run).stat().st_size > 10_000
    assert audit(run)
    with pytest.raises(WorkbenchError, match="TABLE.NAME=VALUE"):
        launch.main(["max_steps=2"])
    with pytest.raises(WorkbenchError, match="did you mean 'max_steps'"):
        launch.main(["grpo.max_step=2"])


def test_what_cannot_be_read_is_said_in_a_line(tmp_path):
    for text, reason in (("method = ", "Invalid value"), ("grpo = 3", "a table"), ("method = 3", "a string")):
        (tmp_path / "run.toml").write_text(text)
        with pytest.raises(WorkbenchError, match=reason):
            launch.main(["--config", str(tmp_path / "run.toml")])
    with pytest.raises(WorkbenchError, match="none.toml cannot be read"):
        launch.main(["--config", str(tmp_path / "none.toml")])
    cpu = ["grpo.use_cpu=true", "grpo.bf16=false", "--out", str(tmp_path), "grpo.max_steps=1"]
    with pytest.raises(WorkbenchError, match="could not be loaded"):
        launch.main([*cpu, "--model", str(tmp_path / "nothing"), "play.teacher=false"])
    assert not list(tmp_path.glob("trl/*"))


def test_learned_positions_count_from_the_first_token_and_dropout_is_off(tokenizer, tmp_path):
    """Prompts of two lengths, padded on their left; scores are those that tokens were sampled at all the same."""
    prepare(tmp_path, tokenizer)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2,
        pad_token_id=0, eos_token_id=2, bos_token_id=None,
    ))  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    trainer = credit_trainer(tmp_path, "grpo", 1, args={"beta": 0.05})
    trainer.train()
    batch = trainer.step.batch
    sampled = Batch.from_episodes(trainer.step.episodes, "episode", 0)
    mask = batch.response_mask
    assert len(set(mask.int().argmax(1).tolist())) > 1
    for scores in (batch.old_logprobs, batch.reference_logprobs):
        torch.testing.assert_close(scores[mask], sampled.old_logprobs[mask], rtol=0, atol=1e-4)
    assert trainer.step.updates[0]["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_a_model_that_only_trl_can_sample_from(tokenizer, tmp_path):
    """Refused before there is a run folder, unless TRL's own generation is asked for."""
    prepare(tmp_path, tokenizer)
    model = FalconForCausalLM(FalconConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        eos_token_id=2, bos_token_id=None,
    ))  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(WorkbenchError, match="sampler = 'engine'"):
        launch.main([
            "--env", "parity", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"),
            f"play.skills={tmp_path / 'skills'}", *(f"play.{k}={v}" for k, v in GAME.items()),
            "grpo.use_cpu=true", "grpo.bf16=false", "grpo.max_steps=1", "grpo.num_generations=4",
        ])  # fmt: skip
    assert not list(tmp_path.glob("out/*/*"))
    trainer = credit_trainer(tmp_path, "grpo", 1, args={"sampler": "engine"})
    trainer.train()
    assert trainer.step.updates[0]["ratio_max"] == pytest.approx(1, abs=1e-4)


def test_losses_that_trl_has_and_losses_that_it_has_not():
    mapped = trl_loss(method("grpo", clip_high=0.3).loss)
    assert mapped == {
        "loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.3, "delta": 3.0, "importance_sampling_level": "token",
    }  # fmt: skip
    assert {trl_loss(method("grpo", aggregation=how).loss)["loss_type"] for how in LOSS_TYPES} == {*LOSS_TYPES.values()}
    for options in ({"ratio": "turn"}, {"ratio": "row"}, {"aggregation": "turn_mean"}, {"engine_cap": 2.0}):
        assert trl_loss(method("grpo", **options).loss) is None
    assert trl_loss(method("opd").loss) is None


def test_every_method_is_either_played_or_refused_with_a_reason():
    refused = set()
    for name in METHODS:
        try:
            check_method(method(name))
        except WorkbenchError as error:
            assert name in str(error)
            refused.add(name)
    assert refused == {"dapo", "v05", "coba", "v0", "opsd", "dear", "self_verification"}


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("grpo", {"scale_rewards": "batch"}, "scale_rewards"),
        ("grpo", {"loss_type": "sapo"}, "loss_type"),
        ("grpo", {"epsilon": 0.1}, "epsilon"),
        ("grpo", {"max_steps": -1}, "max_steps"),
        ("grpo", {"max_grad_norm": 0.0}, "max_grad_norm"),
        ("grpo", {"steps_per_generation": 2}, "gradient_accumulation_steps"),
        ("grpo", {"num_iterations": 2}, "num_iterations"),
        ("grpo", {"mask_truncated_completions": True}, "mask_truncated_completions"),
        ("gspo", {"top_entropy_quantile": 0.2}, "top_entropy_quantile"),
        ("gspo", {"beta": 0.1}, "use_bias_correction_kl"),
    ],
)
def test_options_that_cannot_be_kept_are_errors(tmp_path, name, changes, reason):
    args = trl_args(tmp_path)
    for key, value in changes.items():
        setattr(args, key, value)
    with pytest.raises(WorkbenchError, match=reason):
        fitted(args, method(name), PlayConfig().limits)


def test_gates_that_cannot_see_or_drop_a_gradient_are_errors():
    gate, plain = method("grpo_dgg"), method("grpo")
    check_engine(gate, "FSDP", True, 2)
    check_engine(plain, "DEEPSPEED", False, 1)
    for given in (("DEEPSPEED", True, None), ("FSDP", True, 1), ("NO", False, None)):
        with pytest.raises(WorkbenchError, match="grpo_dgg"):
            check_engine(gate, *given)
    with pytest.raises(WorkbenchError, match="one row"):
        PlayConfig(history=2)


def test_shipped_configurations_are_read():
    from accelerate.commands.config.config_args import load_config_from_file
    from trl import GRPOConfig

    configs = Path(launch.__file__).parent / "configs"
    kinds = {path.stem: load_config_from_file(str(path)).distributed_type.value for path in configs.glob("*.yaml")}
    assert kinds == {"fsdp2": "FSDP", "ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    for path in configs.glob("*.toml"):
        names = dict.fromkeys(("method", "env", "model", "out", "experiment"))
        asked = launch._asked(argparse.Namespace(config=str(path), set=[], **names))
        cpu = {"output_dir": "unused", "use_cpu": True, "bf16": False, "eval_strategy": "no"}
        play = from_mapping(PlayConfig, asked["play"])
        own = method(asked["method"], **asked["options"])
        args, by_trl = fitted(GRPOConfig(**asked["grpo"] | cpu), own, play.limits)
        assert by_trl and args.loss_type == "grpo"


def test_kl_and_accumulation_in_a_loss_that_is_not_trls(folder):
    """Micro-batches add up to the batch, with a turn's ratio and a KL."""
    runs = []
    for batch, steps in ((8, 1), (2, 4)):
        args = {
            "beta": 0.05, "use_bias_correction_kl": False, "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": steps,
        }  # fmt: skip
        trainer = credit_trainer(folder, "gspo", 2, args=args)
        trainer.train()
        runs.append(trainer)
    first, second = (run.folder.read("updates") for run in runs)
    assert (first["kl_reference"][1:] > 0).all()
    assert_frame_equal(first, second, rel_tol=1e-3, abs_tol=1e-5)
