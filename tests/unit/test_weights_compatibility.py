from libra.weights.compatibility import incompatibilities
from libra.weights.manifest import TensorEntry


def entries(*, dtype="F32", **shapes):
    return [
        TensorEntry(name=name.replace("__", "."), dtype=dtype, shape=shape, file="f")
        for name, shape in shapes.items()
    ]


LOADED = entries(norm=(4,), lm_head__weight=(8, 4), embed=(8, 4))


def problems(offered, *, loaded=LOADED, tied_embeddings=False, may_cast=True):
    return incompatibilities(loaded, offered, tied_embeddings=tied_embeddings, may_cast=may_cast)


def test_the_same_tensors_replace_themselves():
    assert problems(LOADED, may_cast=False) == ()


def test_missing_and_additional_tensors_are_named():
    offered = entries(norm=(4,), lm_head__weight=(8, 4), other=(8, 4))
    assert problems(offered) == ("embed is missing", "other is not in the model")


def test_a_shape_is_named_with_both_sides():
    offered = entries(norm=(4,), lm_head__weight=(8, 4), embed=(4, 8))
    assert problems(offered) == ("embed has shape [4, 8] instead of [8, 4]",)


def test_a_cast_is_allowed_in_one_way_for_all_and_only_where_it_may_be():
    whole = entries(dtype="BF16", norm=(4,), lm_head__weight=(8, 4), embed=(8, 4))
    assert problems(whole) == ()
    assert problems(whole, may_cast=False) == ("tensors of dtype F32 became BF16",)
    mixed = [*whole[:2], *LOADED[2:]]
    assert problems(mixed) == ("tensors of dtype F32 became BF16 and F32",)
    integers = entries(dtype="I8", norm=(4,), lm_head__weight=(8, 4), embed=(8, 4))
    assert problems(integers) == ("tensors of dtype F32 became I8",)


def test_a_tied_head_may_be_there_or_not():
    without = [entry for entry in LOADED if entry.name != "lm_head.weight"]
    assert problems(without, tied_embeddings=True) == ()
    assert problems(LOADED, loaded=without, tied_embeddings=True) == ()
    assert problems(without) == ("lm_head.weight is missing",)


def test_tensors_that_follow_from_the_configuration_do_not_count():
    loaded = [*LOADED, *entries(layers__0__rotary_emb__inv_freq=(2,))]
    assert problems(LOADED, loaded=[*loaded]) == ()
