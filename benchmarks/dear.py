"""DEAR's choice of tokens against what gives it its input: one pass of the model that yields their hidden states.

Rows of one length are read by a model's body, in micro-batches as a training step reads them, and then decisions and
evidence are chosen among all their tokens. Also timed: one copy of the hidden states, the least that any use of them
costs. The last line is the mask's time over the pass's.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from workbench import shipped
from workbench.distill import dear
from workbench.policy import Policy


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least of several times."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description="DEAR's mask against one hidden-state pass over the same tokens.")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="sampled tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of a response")
    parser.add_argument("--model", default=str(shipped.data("models", "twc-small")), help="hub name or folder")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    policy = Policy.load(options.model, options.device)
    rows = max(1, options.tokens // options.length)
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.lm_head.weight.shape[0]
    ids = torch.randint(vocabulary, (rows, options.length), generator=generator).to(policy.device)
    per = max(1, 16384 // options.length)

    @torch.no_grad()
    def read() -> torch.Tensor:
        return torch.cat([policy.hidden(ids[i : i + per]).flatten(0, 1) for i in range(0, rows, per)])

    begun = time.perf_counter()
    hidden = read()
    once = time.perf_counter() - begun
    n = len(hidden)
    entropy, kl = (torch.rand(n, generator=generator).to(policy.device) for _ in range(2))
    response = torch.arange(rows, device=policy.device).repeat_interleave(options.length)
    chosen = dear.select(entropy, kl, hidden, response)
    many, more = dear.counts(torch.tensor([options.length]))
    if int(chosen.keep.sum()) != rows * int(many + more):
        print("dear: another number of tokens was kept than was asked for", file=sys.stderr)
        return 1
    once = min(once, seconds(read, policy.device, options.repeats - 1)) if options.repeats > 1 else once
    copy = seconds(hidden.clone, policy.device, options.repeats)
    mask = seconds(lambda: dear.select(entropy, kl, hidden, response), policy.device, options.repeats)
    print(
        f"{n:,} tokens in responses of {options.length}, states of {hidden.shape[1]}; {options.device}, "
        f"{torch.get_num_threads()} threads; {float(chosen.keep.float().mean()):.0%} kept"
    )
    print(f"hidden-state pass {once:.2f} s, copy of the states {copy:.3f} s, mask {mask:.2f} s")
    print(f"mask / copy: {mask / copy:.1f}")
    print(f"{mask / once:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
