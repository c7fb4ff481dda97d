"""The checks by name: how bad a finding is, what is counted, what it does to training, what it takes to look."""

from dataclasses import dataclass

CORRUPTS, WORTH_KNOWING = "corrupts training", "worth knowing"

POSITIVE = 1e-3  # nats above 0 that rounding explains, as records.Batch allows
MISMATCH = 0.1  # nats, mean over a turn's tokens of |difference|; bfloat16 engines differ by about a tenth of it
SATURATED = 0.01  # a belief this near to 0 or 1, as credit.agent_opsd.saturation counts
SAME_LOGPROB = 1e-5  # nats: what two passes over the same context may differ by
# Stop reasons that say that the policy came to its own end.
FINISHED = frozenset("stop eos end_turn complete completed is_completed finished done agent_completed env_done".split())


@dataclass(frozen=True)
class Check:
    """effect: one sentence on what it does to training. needs: what a source must hold for the check to look."""

    name: str
    severity: str
    unit: str
    effect: str
    needs: str


_ALL = (
    Check(
        "length_mismatch", CORRUPTS, "turns",
        "Log-probs, credit or mask fall on other tokens than their own, or the trainer drops the row.",
        "two of: token ids, mask, log-probs, advantages",
    ),
    Check(
        "empty_mask", CORRUPTS, "turns",
        "The turn trains nothing, yet its reward counts in the group's baseline.",
        "token ids or a mask",
    ),
    Check(
        "environment_tokens", CORRUPTS, "turns",
        "The policy is trained to write what the environment says, and its log-probs there are not of sampled tokens.",
        "token ids with the next observation, or their text",
    ),
    Check(
        "zero_credit", CORRUPTS, "turns",
        "Tokens with advantage 0 train nothing but count in the loss's mean, although their group has a signal.",
        "rewards and advantages of groups",
    ),
    Check(
        "groups_without_variance", WORTH_KNOWING, "groups",
        "Equal rewards give every episode of the group advantage 0: its rollouts were paid for and teach nothing.",
        "rewards of groups of two or more",
    ),
    Check(
        "duplicate_turns", CORRUPTS, "turns",
        "A turn that is there twice weighs twice in the loss, in group means and in a belief's evidence.",
        "ids of episodes",
    ),
    Check(
        "turn_gaps", CORRUPTS, "turns",
        "Turns are missing between those that are there: evidence of the episode is lost and credit moves to others.",
        "numbers of turns",
    ),
    Check(
        "text_realigned", WORTH_KNOWING, "turns",
        "The text differs from the decoded tokens in spacing or character form only; tokenised again it drifts.",
        "a tokenizer, token ids and their text",
    ),
    Check(
        "text_forked", CORRUPTS, "turns",
        "The trained tokens are not the text that was played, so the reward is credited to other actions.",
        "a tokenizer, token ids and their text",
    ),
    Check(
        "positive_logprobs", CORRUPTS, "tokens",
        "A log-prob above 0 is no log-probability: importance ratios and evidence made of it are wrong.",
        "log-probs",
    ),
    Check(
        "missing_logprobs", CORRUPTS, "tokens",
        "Without the log-prob a token was sampled at, its importance ratio and its gap are made up or not a number.",
        "log-probs of some turns",
    ),
    Check(
        "not_finite", CORRUPTS, "values",
        "Credit, a reward or a belief that is no finite number makes the loss none; a token id below 0 names no token.",
        "token ids, advantages, rewards or beliefs",
    ),
    Check(
        "rescore_differs", WORTH_KNOWING, "turns",
        f"Recorded log-probs are over {MISMATCH} nats a token from a re-score: where the same weights gave it, context "
        "or temperature differ or values are shifted, and ratios are wrong.",
        "re-scored log-probs",
    ),
    Check(
        "trainer_mismatch", CORRUPTS, "turns",
        f"Sampler and trainer disagree by over {MISMATCH} nats a token, so ratios are far from 1 before any update.",
        "log-probs of the sampler and of the trainer",
    ),
    Check(
        "missing_privileged_text", CORRUPTS, "episodes",
        "The teacher read what the student read: its gap is noise and every signal made of it is, too.",
        "teacher log-probs or the teacher's context",
    ),
    Check(
        "truncated_teacher_context", CORRUPTS, "turns",
        "The teacher scored the turn with a part of its context cut off, so the gap measures the cut.",
        "the teacher's context and what it should hold",
    ),
    Check(
        "prior_out_of_range", CORRUPTS, "episodes",
        "A prior is a success rate: outside [0, 1] the belief is clamped to an end and no turn can move it.",
        "priors",
    ),
    Check(
        "prior_wrong_scale", CORRUPTS, "groups",
        "The prior is the mean of raw rewards and not the success rate, so beliefs start at the wrong end.",
        "priors with the rewards of their group",
    ),
    Check(
        "saturated_beliefs", WORTH_KNOWING, "turns",
        f"A belief within {SATURATED} of 0 or 1 hardly moves: revisions vanish, and what is standardised is noise.",
        "beliefs",
    ),
    Check(
        "per_turn_baselines", CORRUPTS, "groups",
        "Advantages are centred over turns of the same number: the baseline depends on when episodes stop, which pays "
        "or punishes taking another turn (verl#7244).",
        "rewards and turn advantages of groups whose episodes differ in length",
    ),
    Check(
        "truncated_as_finished", CORRUPTS, "turns",
        "A response that was cut at the token limit is rewarded as one that ended, so running into it is reinforced.",
        "the truncation flag, with the stop reason or token ids",
    ),
    Check(
        "optimizer_steps", WORTH_KNOWING, "rollout batches",
        "Not one but several optimizer steps, or none, were taken on the batch: all but the first are off-policy.",
        "the updates of a run, or the size of a minibatch",
    ),
)  # fmt: skip
CHECKS = {check.name: check for check in _ALL}
