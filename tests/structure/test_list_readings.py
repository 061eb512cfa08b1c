"""The two readings of a list: which is taken, which is refused, and which stays."""

from __future__ import annotations

import torch

from instep.structure.placements import Nested, PerSample, Replicate, Shard
from instep.structure.plan import Planner

from .plan_helpers import plan, refusal

# The two readings of a list


def test_a_list_is_read_as_whatever_fits_the_rest() -> None:
    features = [torch.zeros(8, 3), torch.zeros(8, 5)]
    assert plan(y=torch.zeros(8), f=features).placements[1] == Nested((0, 1), (Shard(0), Shard(0)))
    assert plan(y=torch.zeros(2), f=features).placements[1] == PerSample()


def test_a_list_that_fits_both_ways_names_both() -> None:
    both = [torch.zeros(2, 3), torch.zeros(2, 5)]
    message = refusal(y=torch.zeros(2), f=both)
    assert "'f' (list of 2)" in message
    assert "what 'f' is: 'samples' if it has one entry per sample, 0 if every entry has the batch in dim 0" in message
    assert plan(Planner(2, in_dims={"f": "samples"}), y=torch.zeros(2), f=both).placements[1] == PerSample()
    assert plan(Planner(2, in_dims={"f": 0}), y=torch.zeros(2), f=both).placements[1] == Nested(
        (0, 1), (Shard(0), Shard(0))
    )


def test_one_sample_is_not_split_however_its_lists_are_read() -> None:
    planner = Planner(4)
    assert plan(planner, y=torch.zeros(1), f=[torch.zeros(1, 3)]).sizes == (1,)
    assert not planner.readings  # nothing was learned
    assert plan(planner, y=torch.zeros(4), f=[torch.zeros(4, 3)]).placements[1] == Nested((0,), (Shard(0),))


def test_a_lone_list_that_fits_two_sizes_names_both() -> None:
    images = [torch.zeros(3, 8, 8) for _ in range(4)]
    message = refusal(images=images)
    assert "3 and 4 both match" in message
    choices = "'samples' if the batch has 4 samples (list of 4), 0 if the batch has 3 samples (size 3 along dim 0)"
    assert f"what 'images' is: {choices}" in message
    assert plan(Planner(2, in_dims={"images": "samples"}), images=images).batch_size == 4
    assert plan(Planner(2, in_dims={"images": 0}), images=images).batch_size == 3


def test_a_doubt_inside_one_reading_does_not_stand_against_the_other() -> None:
    """Two samples of two tensors: the first sample alone could be read both ways, the second not at all."""
    samples = [[torch.zeros(2), torch.zeros(2)], [torch.zeros(5), torch.zeros(7), torch.zeros(1)]]
    assert plan(y=torch.zeros(2), samples=samples).placements[1] == PerSample()


def test_what_is_declared_inside_a_list_makes_it_a_structure() -> None:
    pair = [torch.zeros(2, 3), torch.zeros(2, 5)]
    found = plan(Planner(2, in_dims={"f.0": None}), y=torch.zeros(2), f=pair)
    assert found.placements[1] == Nested((0, 1), (Replicate("in_dims is None"), Shard(0)))


# What a size alone gets wrong


def test_detection_lists_of_three_images_of_three_channels() -> None:
    images = [torch.zeros(3, 8, 8 + n) for n in range(3)]
    targets = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 4, 2)]
    message = refusal(images=images, targets=targets)
    assert "what 'images' is: 'samples' if it has one entry per sample" in message
    found = plan(Planner(3, in_dims={"images": "samples"}), images=images, targets=targets)
    assert found.placements == (PerSample(), PerSample())
    assert found.sizes == (1, 1, 1)


def test_detection_lists_of_four_images_need_no_word() -> None:
    images = [torch.zeros(3, 8, 8) for _ in range(4)]
    targets = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 4, 2, 3)]
    planner = Planner(2)
    assert plan(planner, images=images, targets=targets).placements == (PerSample(), PerSample())
    # And then three of them need none either: the first reading stays.
    assert plan(planner, images=images[:3], targets=targets[:3]).placements == (PerSample(), PerSample())


def test_class_weights_are_refused_until_declared_whole() -> None:
    weights = torch.ones(10)
    message = refusal(x=torch.zeros(8, 3), weights=weights)
    assert "'weights' (Tensor [10]) for a batch of 8" in message
    assert "'x': size 8 along dim 0; 'weights': size 10 along dim 0" in message
    assert "what 'weights' is: None if every replica gets all of it" in message
    planner = Planner(2, in_dims={"weights": None})
    for size in (8, 10):
        assert plan(planner, x=torch.zeros(size, 3), weights=weights).placements == (
            Shard(0),
            Replicate("in_dims is None"),
        )


def test_hidden_state_whose_batch_is_in_dim_1() -> None:
    hx = (torch.zeros(4, 4, 5), torch.zeros(4, 4, 5))
    found = plan(Planner(2, in_dims={"hx": 1}), x=torch.zeros(4, 7, 3), hx=hx)
    assert found.placements == (Shard(0), Nested((0, 1), (Shard(1), Shard(1))))
    message = refusal(x=torch.zeros(8, 7, 3), hx=(torch.zeros(4, 8, 5), torch.zeros(4, 8, 5)))
    assert "None for 'hx.0' if every replica gets all of it" in message
    assert "1 for 'hx.0' if the batch is dim 1, which has size 8" in message


def test_an_image_size_stays_whole_at_a_batch_of_two() -> None:
    planner = Planner(2)
    assert isinstance(plan(planner, x=torch.zeros(8, 3), size=[224, 224]).placements[1], Replicate)
    found = plan(planner, x=torch.zeros(2, 3), size=[224, 224])
    assert found.batch_size == 2
    assert isinstance(found.placements[1], Replicate)


def test_a_temperature_as_first_argument() -> None:
    found = plan(temperature=torch.ones(1), x=torch.zeros(8, 3))
    assert found.batch_size == 8
    assert found.placements == (Replicate("size 1 broadcasts"), Shard(0))


def test_edges_of_a_graph_are_refused() -> None:
    message = refusal(x=torch.zeros(8, 3), edge_index=torch.zeros(2, 8, dtype=torch.long))
    assert "'edge_index' (Tensor [2, 8])" in message
    assert "what 'edge_index' is: None if every replica gets all of it" in message
    assert "1 if the batch is dim 1, which has size 8" in message


def test_a_mask_for_every_sample_of_any_batch_is_whole() -> None:
    assert plan(x=torch.zeros(8, 4), mask=torch.zeros(1, 4)).placements[1] == Replicate("size 1 broadcasts")


# Readings stay


def test_a_column_stays_a_column() -> None:
    planner = Planner(2)
    assert plan(planner, x=torch.zeros(3), f=[torch.zeros(n) for n in (2, 5, 7)]).placements[1] == PerSample()
    assert plan(planner, x=torch.zeros(2), f=[torch.zeros(2), torch.zeros(2)]).placements[1] == PerSample()
    message = refusal(planner, x=torch.zeros(3), f=[torch.zeros(3), torch.zeros(3)])
    assert "'f' (list of 2)" in message
    assert "had one entry per sample in the first call" in message


def test_a_structure_stays_a_structure() -> None:
    planner = Planner(2)
    inside = Nested((0, 1), (Shard(0), Shard(0)))
    assert plan(planner, x=torch.zeros(8), f=[torch.zeros(8), torch.zeros(8)]).placements[1] == inside
    assert plan(planner, x=torch.zeros(2), f=[torch.zeros(2), torch.zeros(2)]).placements[1] == inside


def test_words_stay_whole() -> None:
    planner = Planner(2)
    for size in (8, 2):
        assert isinstance(plan(planner, x=torch.zeros(size), names=("left", "right")).placements[1], Replicate)


def test_an_empty_list_teaches_nothing() -> None:
    for empty, full in (([], ["a", "b"]), ((), ("a", "b")), ([], [torch.zeros(3), torch.zeros(4)])):
        planner = Planner(2)
        assert isinstance(plan(planner, x=torch.zeros(8), names=empty).placements[1], Replicate)
        assert plan(planner, x=torch.zeros(2), names=full).placements[1] == PerSample()


def test_words_that_become_tensors_are_read_anew() -> None:
    planner = Planner(2)
    assert isinstance(plan(planner, x=torch.zeros(8), v=[1, 2]).placements[1], Replicate)
    found = plan(planner, x=torch.zeros(8), v=[torch.zeros(8), torch.zeros(8)])
    assert found.placements[1] == Nested((0, 1), (Shard(0), Shard(0)))


def test_a_batch_of_one_teaches_nothing() -> None:
    planner = Planner(2)
    plan(planner, x=torch.zeros(1, 3), names=["a"], size=[224, 224])
    assert not planner.readings
    found = plan(planner, x=torch.zeros(2), names=["a", "b"], size=[224, 224, 3])
    assert found.placements[1] == PerSample()


def test_what_is_refused_teaches_nothing() -> None:
    planner = Planner(2)
    refusal(planner, x=torch.zeros(2), names=["a", "b"], odd=torch.zeros(5))
    assert not planner.readings


def test_readings_are_kept_inside_structures_too() -> None:
    planner = Planner(2)
    plan(planner, batch={"x": torch.zeros(8), "deep": ([224, 224],)})
    found = plan(planner, batch={"x": torch.zeros(2), "deep": ([224, 224],)})
    assert found.placements == (
        Nested(("x", "deep"), (Shard(0), Nested((0,), (Replicate("replicated in the first call"),)))),
    )
