"""Who moved the log-ratio: mismatch, staleness or the update itself, from the sums of the token kernel.

For a token sampled at version v, with b the rollout engine's log-prob, c the trainer's under the weights of v, p the
trainer's under the proximal snapshot (pi_old) and q the trainer's at the update:

    q - b = U + S + M,    U = q - p (update drift),  S = p - c (staleness),  M = c - b (mismatch)

`identity` says which parts the recorded sets determine, `shapley` shares any functional of the sum exactly among
them, `bracket` bounds the mismatch share where S and M were recorded as one, `per_lag` and `tails` describe the gap,
and `damage` turns it into the share of the training signal lost. Nothing here assumes that the parts are
independent. All intervals are clustered (tokens of one prompt group are not independent) and deterministic.
"""
