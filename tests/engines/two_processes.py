"""Runs over two processes, each of KINDS. Leaves what each process saw in the folder.

python two_processes.py FOLDER STEPS KIND...: one process imports everything and becomes two.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "ACCELERATE_USE_CPU": "true"}

import torch  # noqa: E402
from accelerate import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from engine_cases import GATED, adam_steps, credit_trainer, register  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from workbench.engines.trl import CreditTrainer  # noqa: E402

# folder of the model, method and its options; an engine samples where the kind says so
KINDS = {
    "ddp": ("tied", "agent_opsd_dgg", GATED),
    "ddp-own-loss": ("untied", "sdar", {"coef": 0.5, "ratio": "turn"}),  # neither part of this loss is TRL's
    "fsdp2": ("untied", "agent_opsd_dgg", GATED),
    "fsdp2-engine": ("untied", "agent_opsd_dgg", GATED),
}


def shard() -> None:
    """accelerate shards on accelerators only, though what it calls runs on CPUs: let its state say FSDP here too."""
    begin = AcceleratorState.__init__

    def init(self, *args, **options):
        begin(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
                state_dict_type="FULL_STATE_DICT",
            )  # fmt: skip

    AcceleratorState.__init__ = init


class Scripted(CreditTrainer):
    """Plays the episodes that one process played, so that the update alone is compared."""

    def play(self, jobs, temperature, teacher=None):
        if self.script is None:
            return super().play(jobs, temperature, teacher)
        return [self.script[self.number][job.key[-1]] for job in jobs]


def main(folder: Path, steps: int, kind: str) -> None:
    AcceleratorState._reset_state(True)
    if kind.startswith("fsdp2"):
        shard()
    script = folder / "script.pt"
    Scripted.script = torch.load(script, weights_only=False) if kind == "fsdp2" else None
    home, name, options = KINDS[kind]
    args, record = {"processes": 2, "output_dir": folder / kind}, os.environ["RANK"] == "0"
    trainer = credit_trainer(folder / home, name, steps, record=record, kind=Scripted, args=args, **options)
    updates, after = [], trainer.after_update

    def watched():
        updates.append(dict(trainer.step.updates[-1]))
        after()

    trainer.after_update = watched
    trainer.train()
    rank = trainer.accelerator.process_index
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in trainer.bare.named_parameters()}
    torch.save(
        {
            "updates": updates, "weights": whole, "adam": adam_steps(trainer.optimizer),
            "sharded": any(isinstance(p, DTensor) for p in trainer.bare.parameters()),
            "world": trainer.accelerator.num_processes, "tokens": trainer.step.batch.input_ids,
        },
        folder / f"{kind}-{rank}.pt",
    )  # fmt: skip


def work(rank: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    register()
    for kind in sys.argv[3:]:
        main(Path(sys.argv[1]), int(sys.argv[2]), kind)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, free)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        if any(worker.exitcode for worker in workers):  # the other would wait for it for ever
            for worker in workers:
                worker.terminate()
        workers[0].join(0.1)
    sys.exit(max(abs(worker.exitcode) for worker in workers))
