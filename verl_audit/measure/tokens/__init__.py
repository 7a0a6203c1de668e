"""Token-level sums of trace files: one streaming pass, bounded memory, the same bits however the work is shared out."""

from verl_audit.measure.tokens.engines import Failure, Reduced, reduce_all, shards
from verl_audit.measure.tokens.reduce import reduce_batches
from verl_audit.measure.tokens.shard import reduce_shard
from verl_audit.measure.tokens.spec import Spec
from verl_audit.measure.tokens.sums import TokenSums, merge

__all__ = ["Failure", "Reduced", "Spec", "TokenSums", "merge", "reduce_all", "reduce_batches", "reduce_shard", "shards"]
