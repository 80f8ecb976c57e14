"""Sampling seeds: the same on every server, on every machine and after a resume."""

from hashlib import blake2b

from libra.rollouts.group import AdmittedGroup

_SEED_BYTES = 8
_POSITIVE_INT64 = (1 << 63) - 1


def sampling_seed(
    run_seed: int, group: AdmittedGroup, *, sample_index: int, turn: int = 0, piece: int = 0
) -> int:
    """A seed in [0, 2**63) for one engine request.

    Depends on the prompt, the epoch, the attempt, the sample, the turn and the piece of an answer
    that had to be continued, and on nothing that a restart or another routing decision would
    change. A request that failed before it gave a token is repeated with the same seed.
    """
    prompt = group.prompt
    # repr keeps the fields apart whatever characters a prompt id holds.
    key = repr((run_seed, prompt.prompt_id, prompt.epoch, group.attempt, sample_index, turn, piece))
    digest = blake2b(key.encode(), digest_size=_SEED_BYTES, person=b"libra-sampling").digest()
    return int.from_bytes(digest, "little") & _POSITIVE_INT64
