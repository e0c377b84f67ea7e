"""Tensor names to pairs, and every fault that can be seen without a model."""

import math

import pytest
import torch

from sgld_lora_merge.adapter.known_pairs import KEPT_SIGNATURES, BucketPairs, _known, layers_of
from sgld_lora_merge.adapter.names import layer_name, parse_name
from sgld_lora_merge.adapter.pairing import PAIR_DTYPES, _all_finite, _Half, pair_up
from sgld_lora_merge.wire.bucket import flatten, unflatten
from sgld_lora_merge.wire.layout import layout_text, read_layout

LAYER = "transformer_blocks.0.attn.to_q"


def sides(layer="to_q", *, rank=2, inputs=6, outputs=4, dtype=torch.float32, suffix=""):
    """The two named tensors of one layer, of random values."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rank, inputs, generator=generator).to(dtype)
    b = torch.randn(outputs, rank, generator=generator).to(dtype)
    return [(f"{layer}.lora_A{suffix}", a), (f"{layer}.lora_B{suffix}", b)]


def faults_of(named, **options):
    return pair_up(named, **options).faults


# names


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize(
    "suffix", ["", ".weight", ".default", ".default.weight", ".actor-v2.weight", ".my.dotted.name", ".v1.5.weight"]
)
def test_every_name_form_of_the_contract_is_one_layer(prefix, suffix):
    """Case N5 among them: the adapter segment is stripped."""
    pairing = pair_up(sides(prefix + LAYER, suffix=suffix))

    assert pairing.faults == ()
    assert [pair.layer for pair in pairing.pairs] == [LAYER]


def test_sides_of_one_layer_may_be_named_in_different_forms():
    (_, a), (_, b) = sides()

    pairing = pair_up([("to_q.lora_B.weight", b), ("base_model.model.to_q.lora_A", a)])

    assert pairing.faults == ()
    assert pairing.pairs[0].a is a
    assert pairing.pairs[0].b is b


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("x.lora_A", ""), ("x.lora_A.weight", ""), ("x.lora_A.default", "default"), ("x.lora_B.a.b.weight", "a.b")],
)
def test_parse_name_takes_the_adapter_segment_apart(name, adapter):
    parsed = parse_name(name)

    assert (parsed.layer, parsed.adapter) == ("x", adapter)
    assert parsed.side == name[len("x.lora_")]


def test_layer_name_strips_the_peft_prefix_once_and_only_in_front():
    assert layer_name("base_model.model.x") == "x"
    assert layer_name("x.base_model.model.y") == "x.base_model.model.y"


def test_pairs_come_sorted_by_layer():
    pairing = pair_up([*sides("c"), *sides("a"), *sides("b")])

    assert [pair.layer for pair in pairing.pairs] == ["a", "b", "c"]


def test_two_adapters_on_one_layer_are_an_error_naming_both():
    """Case N4."""
    faults = faults_of(sides(LAYER, suffix=".default.weight") + sides(LAYER, suffix=".old.weight"))

    for side in "AB":
        default, old = (f"{LAYER}.lora_{side}.{adapter}.weight" for adapter in ("default", "old"))
        assert any(default in fault and old in fault for fault in faults)


def test_sides_of_different_adapters_are_not_a_pair():
    (_, a), (_, b) = sides()

    (fault,) = faults_of([("x.lora_A.default.weight", a), ("x.lora_B.old.weight", b)])

    assert "'x.lora_A.default.weight' and 'x.lora_B.old.weight' belong to different adapters" in fault


def test_a_name_sent_twice_is_an_error():
    faults = faults_of(sides() + sides()[:1])

    assert faults == ("'to_q.lora_A' and 'to_q.lora_A' are the same lora_A",)


def test_one_layer_with_and_without_the_peft_prefix_is_an_error_naming_both():
    faults = faults_of(sides("x") + sides("base_model.model.x"))

    assert "'base_model.model.x.lora_A' and 'x.lora_A' are the same lora_A" in faults
    assert "'base_model.model.x.lora_B' and 'x.lora_B' are the same lora_B" in faults


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight", "text encoder in kohya format"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1.alpha", "text encoder in kohya format"),
        ("to_q.lora_magnitude_vector", "DoRA"),  # case S4
        ("base_model.model.to_q.lora_magnitude_vector.default.weight", "DoRA"),
        ("to_q.dora_scale", "DoRA"),
        ("lora_unet_to_q.lokr_w1", "is LoKr, of which no pair can be made"),
        ("vera_A", "VeRA"),
        ("to_q.boft_s", "OFT"),
        ("to_q.lora_B.bias", "bias"),
        ("to_q.lora_B.default.bias", "bias"),
        ("to_q.lora_bias", "bias"),
        ("to_q.bias", "bias"),
        ("to_q.diff_b", "bias"),
        ("to_q.diff", "full difference"),
        ("to_q.set_weight", "full difference"),
        ("embed.lora_embedding_A", "nn.Embedding"),
        ("embed.lora_embedding_B.default", "nn.Embedding"),
        ("to_q.weight", "not named <layer>.lora_A or <layer>.lora_B"),
        ("to_q.lora_C.weight", "not named"),
        ("lora_A", "not named"),
        ("to_q.lora_A.", "not named"),
        ("to_q.lora_AB", "not named"),
        ("", "not named"),
    ],
)
def test_any_other_name_is_refused_by_name_and_by_what_it_is(name, what):
    (fault,) = faults_of([*sides(), (name, torch.ones(4))])

    assert repr(name) in fault
    assert what in fault


@pytest.mark.parametrize("adapter", ["a1", "diff", "dora_scale", "lokr_w1"])
def test_an_adapter_may_be_called_like_another_kind(adapter):
    assert faults_of(sides(suffix=f".{adapter}.weight")) == ()
    assert faults_of(sides("blocks.hada_w1.b1")) == ()


# pairs


@pytest.mark.parametrize(("present", "missing"), [("A", "B"), ("B", "A")])
def test_half_a_pair_is_refused(present, missing):
    named = [item for item in sides() if item[0].endswith(present)]

    assert faults_of(named) == (f"'to_q' has lora_{present} but no lora_{missing}",)


def test_ranks_of_the_two_sides_must_agree():
    named = [sides(rank=2)[0], sides(rank=3)[1]]

    assert faults_of(named) == ("'to_q': lora_A (2, 6) has rank 2, lora_B (4, 3) has rank 3",)


def test_a_wrong_lora_rank_is_refused_with_both_numbers():
    assert faults_of(sides(rank=2), rank=16) == ("'to_q' has rank 2, the request says lora_rank 16",)


def test_the_right_lora_rank_is_accepted():
    assert faults_of(sides(rank=2), rank=2) == ()


def test_layers_with_a_scale_of_their_own_may_have_another_rank():
    """Case S3: rank and alpha 8/16 everywhere, 32/128 on layer 3."""
    named = sides("layers.1", rank=8) + sides("layers.3", rank=32)

    pairing = pair_up(named, alpha=16, rank=8, layer_scaling={"layers.3": 4.0})

    assert pairing.faults == ()
    assert {pair.layer: (pair.rank, pair.scale) for pair in pairing.pairs} == {
        "layers.1": (8, 2.0),
        "layers.3": (32, 4.0),
    }


@pytest.mark.parametrize("shape", [(6,), (), (2, 3, 1, 1, 1, 1)])
def test_a_side_has_two_dimensions_and_perhaps_a_kernel(shape):
    (_, _), b = sides()

    (fault,) = faults_of([("to_q.lora_A", torch.ones(shape)), b])

    assert fault == f"'to_q.lora_A' has shape {shape}; lora_A has two dimensions, or a kernel besides"


@pytest.mark.parametrize("kernel", [(3,), (3, 2), (1, 2, 2), (1, 1)], ids=str)
def test_a_pair_of_a_convolution_is_flattened_and_keeps_its_kernel(kernel):
    a, b = torch.randn(2, 5, *kernel), torch.randn(4, 2, *(1 for _ in kernel))

    (pair,) = pair_up([("proj.lora_A", a), ("proj.lora_B", b)], alpha=4).pairs

    assert (pair.rank, pair.kernel, pair.scale) == (2, kernel, 2.0)
    assert torch.equal(pair.a, a.view(2, -1))
    assert torch.equal(pair.b, b.view(4, 2))


@pytest.mark.parametrize(("a", "b"), [((2, 6, 3, 3), (4, 2)), ((2, 6), (4, 2, 1, 1)), ((2, 6, 3, 3), (4, 2, 3, 3))])
def test_sides_of_different_kinds_of_layer_are_not_a_pair(a, b):
    (fault,) = faults_of([("x.lora_A", torch.ones(a)), ("x.lora_B", torch.ones(b))])

    assert fault.startswith(f"'x': lora_B {b} does not fit lora_A {a}: it needs kernel (")


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_an_empty_side_is_refused_by_name(shape):
    (_, _), b = sides()

    (fault,) = faults_of([("to_q.lora_A", torch.ones(shape)), b])

    assert fault == f"'to_q.lora_A' is empty: shape {shape}"


@pytest.mark.parametrize("dtype", PAIR_DTYPES)
def test_float32_and_both_16_bit_dtypes_are_merged(dtype):
    pairing = pair_up(sides(dtype=dtype))

    assert pairing.faults == ()
    assert pairing.pairs[0].a.dtype is dtype


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.int8,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_any_other_dtype_is_refused_by_name(dtype):
    faults = faults_of(sides(dtype=dtype))

    assert faults == tuple(
        f"'to_q.lora_{side}' has dtype {dtype}; float32, bfloat16 and float16 are merged" for side in "AB"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("dtype", PAIR_DTYPES)
def test_one_value_that_is_not_finite_is_refused_by_name(dtype, side, value):
    """Case M8."""
    named = sides("x", dtype=dtype) + sides("y", dtype=dtype)
    named[side][1][1, 1] = value

    assert faults_of(named) == (f"'x.lora_{'AB'[side]}' holds NaN or infinite values",)


def test_a_pair_on_two_devices_is_refused():
    a, (name, b) = sides()

    (fault,) = faults_of([a, (name, b.to("meta"))])

    assert fault == "'to_q': lora_A is on cpu, lora_B on meta"


def test_an_empty_payload_is_refused():
    assert faults_of([]) == ("the payload holds no lora_A / lora_B tensors",)


# scales


def test_sections_of_a_fused_layer_each_have_their_own_scale():
    """Case F2: rank 2 and alpha 2 on q, k and v is 1.0 for each, not 0.333."""
    pairing = pair_up([*sides("attn.q"), *sides("attn.k"), *sides("attn.v")], alpha=2, rank=2)

    assert [pair.scale for pair in pairing.pairs] == [1.0, 1.0, 1.0]


def test_layer_scaling_is_the_whole_scale_of_its_layer():
    """Case S2: rsLoRA with rank and alpha 16 is 4.0."""
    pairing = pair_up([*sides("x", rank=16), *sides("y", rank=16)], alpha=16, rank=16, layer_scaling={"x": 4.0})

    assert pairing.faults == ()
    assert [pair.scale for pair in pairing.pairs] == [4.0, 1.0]


def test_layer_scaling_may_name_layers_as_peft_does():
    pairing = pair_up(sides("x"), layer_scaling={"base_model.model.x": 0.5})

    assert pairing.faults == ()
    assert pairing.pairs[0].scale == 0.5


def test_layer_scaling_for_a_layer_without_a_pair_is_refused_by_name():
    faults = faults_of(sides("x"), layer_scaling={"x": 1.0, "z": 2.0, "y": 2.0})

    assert faults == ("layer_scaling names layers that have no pair: y, z",)


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e39])
def test_layer_scaling_beyond_float32_is_refused_by_name_and_value(scale):
    (fault,) = faults_of(sides("x"), layer_scaling={"x": scale})

    assert "layer_scaling of 'x'" in fault
    assert str(scale) in fault


def test_an_alpha_beyond_float32_is_refused_by_value():
    (fault,) = faults_of(sides("x"), alpha=1e300)

    assert "lora_alpha 1e+300 over rank 2" in fault


# everything that is wrong


def test_all_faults_come_in_one_result():
    nan = sides("nan")
    nan[0][1][0, 0] = math.nan
    named = [
        *sides("good"),
        *sides("twice"),
        *sides("twice")[:1],
        *sides("lone")[:1],
        sides("uneven", rank=2)[0],
        sides("uneven", rank=3)[1],
        *sides("double", dtype=torch.float64),
        *nan,
        ("flat.lora_A", torch.ones(3)),
        ("flat.lora_B", torch.ones(3, 1)),
        ("hollow.lora_A", torch.ones(1, 0)),
        ("hollow.lora_B", torch.ones(3, 1)),
        ("dora.lora_magnitude_vector", torch.ones(3)),
        *sides("other", rank=5),
    ]

    pairing = pair_up(named, rank=2, layer_scaling={"ghost": 1.0, "flat": 1.0})

    for name in ("twice", "lone", "uneven", "double", "nan", "flat", "hollow", "dora", "other", "ghost"):
        assert any(name in fault for fault in pairing.faults), name
    assert not any("good" in fault for fault in pairing.faults)
    assert "good" in [pair.layer for pair in pairing.pairs]


def test_a_pair_that_is_wrong_in_two_ways_has_both_faults():
    named = sides("x", rank=2)
    named[1][1][0, 0] = math.nan

    faults = faults_of(named, rank=16)

    assert "'x' has rank 2, the request says lora_rank 16" in faults
    assert "'x.lora_B' holds NaN or infinite values" in faults


def test_pairs_are_the_senders_tensors_and_know_their_size():
    a, b = sides(rank=2, inputs=6, outputs=4, dtype=torch.bfloat16)

    (pair,) = pair_up([a, b]).pairs

    assert pair.a is a[1]
    assert pair.b is b[1]
    assert (pair.rank, pair.nbytes) == (2, 2 * (2 * 6 + 4 * 2))


def test_n7_the_prefix_of_original_checkpoints_is_handled():
    named = [(f"diffusion_model.{name}", tensor) for name, tensor in sides("blocks.0.q")]

    assert [pair.layer for pair in pair_up(named).pairs] == ["blocks.0.q"]


@pytest.mark.parametrize(("down", "up"), [("lora_down", "lora_up"), ("lora.down", "lora.up")])
def test_down_and_up_are_a_and_b(down, up):
    (_, a), (_, b) = sides("x")

    (pair,) = pair_up([(f"x.{down}.weight", a), (f"x.{up}.weight", b)]).pairs

    assert pair.a is a
    assert pair.b is b


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
def test_n6_a_kohya_file_is_pairs_under_its_own_flattened_names(prefix):
    """What a flattened name stands for is the module's to say; alphas and scales go by it as it is."""
    (_, a), (_, b) = sides(rank=2)
    one, other = (f"{prefix}joint_blocks_{i}_context_block_attn_proj" for i in range(2))
    named = [(f"{layer}.{side}.weight", t) for layer in (one, other) for side, t in (("lora_down", a), ("lora_up", b))]

    pairing = pair_up([*named, (f"{one}.alpha", torch.tensor(6.0))], layer_scaling={other: 0.5})

    assert pairing.faults == ()
    assert [(pair.layer, pair.scale) for pair in pairing.pairs] == [(one, 3.0), (other, 0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_n7_a_layers_own_alpha_gives_its_scale(dtype, shape):
    """Before the request's alpha, and such a layer may have another rank than the request says."""
    named = [*sides("x", rank=2), ("x.alpha", torch.full(shape, 6, dtype=dtype)), *sides("y", rank=4)]

    pairing = pair_up(named, alpha=8, rank=4)

    assert pairing.faults == ()
    assert [pair.scale for pair in pairing.pairs] == [3.0, 2.0]


def test_layer_scaling_goes_before_a_layers_own_alpha():
    pairing = pair_up([*sides("x"), ("x.alpha", torch.tensor(6.0))], layer_scaling={"x": 0.5})

    assert [pair.scale for pair in pairing.pairs] == [0.5]


@pytest.mark.parametrize(
    ("alpha", "told"),
    [
        (torch.ones(2), "an alpha is one number"),
        (torch.ones(()) * 1j, "an alpha is one number"),
        (torch.tensor(math.nan), "the alpha entry nan of 'x' over rank 2"),
    ],
)
def test_an_alpha_that_is_no_number_is_refused(alpha, told):
    assert any(told in fault for fault in faults_of([*sides("x", rank=2), ("x.alpha", alpha)]))


def test_alphas_without_a_pair_and_second_alphas_are_refused():
    faults = faults_of(
        [
            *sides("x"),
            ("z.alpha", torch.ones(())),
            ("x.alpha", torch.ones(())),
            ("diffusion_model.x.alpha", torch.ones(())),
        ]
    )

    assert "alpha entries of layers that have no pair: z" in faults
    assert "'diffusion_model.x.alpha' is the second alpha entry of its layer" in faults


def test_an_alpha_may_be_required_and_then_any_source_of_it_will_do():
    named = [*sides("x"), *sides("y"), *sides("z"), ("y.alpha", torch.ones(()))]

    pairing = pair_up(named, layer_scaling={"z": 1.0}, alpha_required=True)

    assert pairing.faults == (
        "no alpha for x: PEFT keeps it in adapter_config.json; add lora_alpha=NUMBER to the query, or lora_alpha=rank "
        "if scale 1.0 is meant, as by ComfyUI for a file that says none",
    )
    assert pair_up(named, alpha=1, alpha_required=True).faults == ()


def test_alpha_may_be_each_layers_own_rank_except_where_the_file_says_one():
    named = [*sides("x", rank=4), *sides("y", rank=2), *sides("z", rank=4), ("z.alpha", torch.tensor(2.0))]

    pairing = pair_up(named, alpha="rank", layer_scaling={"y": 3.0}, alpha_required=True)

    assert pairing.faults == ()
    assert [(pair.rank, pair.scale) for pair in pairing.pairs] == [(4, 1.0), (2, 3.0), (4, 0.5)]
    mixed = [*sides("x", rank=4), *sides("y", rank=2)]
    for _ in range(2):  # the second time of a known signature
        assert [pair.scale for pair in pair_up(mixed, alpha="rank").pairs] == [1.0, 1.0]
        assert [pair.scale for pair in pair_up(mixed, alpha=4.0).pairs] == [1.0, 2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_quick_check_of_a_gpu_never_takes_a_bad_value_for_a_good_one(bad, dtype):
    """It may only deny a good one, whose square is too large: the exact check follows then."""
    halves = [_Half(str(i), "", torch.randn(5, 3).to(dtype)) for i in range(4)]
    assert _all_finite(halves)
    halves[2].tensor[4, 1] = bad
    assert not _all_finite(halves)


def in_a_bucket(*tensors):
    flat, entries = flatten([(str(index), tensor) for index, tensor in enumerate(tensors)])
    return flat, [_Half(name, "", tensor) for name, tensor in unflatten(flat, entries)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_quick_check_sees_every_element_of_a_bucket(bad):
    tensors = [torch.randn(3, 5), torch.randn(2, 7).bfloat16(), torch.randn(9, 1).bfloat16(), torch.randn(1, 3)]
    for index, tensor in enumerate(tensors):
        for element in range(tensor.numel()):
            _, halves = in_a_bucket(*tensors)
            assert _all_finite(halves)
            halves[index].tensor.view(-1)[element] = bad
            assert not _all_finite(halves)


def test_the_quick_check_of_a_bucket_that_fills_its_gaps_with_anything_looks_at_the_tensors():
    flat, halves = in_a_bucket(torch.randn(3), torch.randn(5))
    flat[12:16] = 255

    assert _all_finite(halves)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x[:, ::2], lambda x: x.T, lambda x: x[1:3], lambda x: x.as_strided((2, 3), (9, 2))],
)
def test_the_quick_check_sees_every_element_of_a_view(view):
    for element in range(view(torch.zeros(6, 4)).numel()):
        base = torch.zeros(6, 4)
        seen = view(base)
        seen[divmod(element, seen.shape[1])] = math.nan
        assert not _all_finite([_Half("x", "", seen)])
        assert not _all_finite([_Half("x", "", seen), _Half("y", "", base[0])])


def values(pairing):
    return [(p.layer, p.a.tolist(), p.b.tolist(), p.scale, p.kernel) for p in pairing.pairs]


def test_requests_of_one_form_are_paired_alike_and_their_values_are_looked_at_each_time():
    for _ in range(3):
        named = [*sides("y"), *sides("x")]
        pairing = pair_up(named, alpha=3.0, layer_scaling={"y": 0.5})
        assert [(p.layer, p.scale) for p in pairing.pairs] == [("x", 1.5), ("y", 0.5)]
        found = {
            f"{p.layer}.lora_{side}": tensor
            for p in pairing.pairs
            for side, tensor in zip("AB", (p.a, p.b), strict=True)
        }
        assert all(found[name.removesuffix(".weight")] is tensor for name, tensor in named)
        assert pairing.faults == ()
    named[1][1][0, 0] = math.nan
    (fault,) = pair_up(named, alpha=3.0, layer_scaling={"y": 0.5}).faults
    assert fault == f"{named[1][0]!r} holds NaN or infinite values"
    assert [p.scale for p in pair_up([*sides("y"), *sides("x")], alpha=4.0, layer_scaling={"y": 0.5}).pairs] == [
        2.0,
        0.5,
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_values_of_every_bucket_of_a_known_form_are_looked_at(bad):
    def received():
        flat, entries = flatten([(name, tensor.bfloat16()) for name, tensor in (*sides("y"), *sides("x"))])
        return unflatten(flat, read_layout(layout_text(entries)))

    assert isinstance(pair_up(received()).pairs, BucketPairs)
    for position in range(4):
        bucket = received()
        bucket[position][1][0, -1] = bad
        assert pair_up(bucket).faults == (f"{bucket[position][0]!r} holds NaN or infinite values",)
    pairing = pair_up(received(), alpha=3.0, layer_scaling={"y": 0.5})
    assert [(p.layer, p.scale) for p in pairing.pairs] == [("x", 1.5), ("y", 0.5)]
    assert layers_of(pairing.pairs) == [pair.layer for pair in pairing.pairs[:]] == ["x", "y"]


def test_what_lies_between_the_tensors_of_a_bucket_is_no_fault():
    flat, entries = flatten([("x.lora_A", torch.ones(1, 3)), ("x.lora_B", torch.ones(5, 1))])
    flat[12:16] = 255
    assert pair_up(unflatten(flat, read_layout(layout_text(entries)))).faults == ()


def test_a_tensor_under_two_names_says_nothing_of_the_next_request():
    (a, first), (b, second) = sides("x")
    named = [(a, first), (b, second), ("y.lora_A.weight", first), ("y.lora_B.weight", second)]
    for _ in range(2):
        assert len(pair_up(named).pairs) == 2
        fresh = [(name, torch.randn_like(tensor)) for name, tensor in named]
        assert [p.a is fresh[2 * i][1] for i, p in enumerate(pair_up(fresh).pairs)] == [True, True]


def test_faults_alphas_and_many_forms_are_found_again_and_again():
    lone = sides("x")[:1]
    own = [*sides("x"), ("x.alpha", torch.tensor(8.0))]
    for number in range(2 * KEPT_SIGNATURES):
        assert pair_up(lone).faults == ("'x' has lora_A but no lora_B",)
        assert pair_up(own).pairs[0].scale == 8.0 / own[0][1].shape[0]
        assert pair_up(sides(f"layer.{number}")).faults == ()
    assert len(_known) <= KEPT_SIGNATURES


def test_sections_stacked_in_three_dimensions_are_said_to_be_that():
    """Not "it needs kernel": nobody who stacks q, k and v thinks of a convolution."""
    named = [("blocks.0.qkv.lora_A", torch.ones(3, 4, 64)), ("blocks.0.qkv.lora_B", torch.ones(3, 64, 4))]
    (fault,) = pair_up(named).faults
    assert "lora_A (3, 4, 64) and lora_B (3, 64, 4) are 3 pairs in one" in fault
    assert "send each section of a fused layer under its own name" in fault


def test_a_convolution_of_one_channel_is_no_stack():
    pairing = pair_up([("x.lora_A", torch.ones(4, 1, 3)), ("x.lora_B", torch.ones(4, 4, 1))])
    assert (pairing.faults, pairing.pairs[0].kernel) == ((), (3,))
