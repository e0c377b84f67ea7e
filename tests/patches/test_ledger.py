"""The ledger of updates that arrive in buckets."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from server_patches.ledger import KEPT_NBYTES, KEPT_UPDATES, Ledger, NamedBucket
from sgld_lora_merge.errors import ConflictError

TERMS = {"lora_alpha": 8, "weight_version": "1"}


def bucket(index=0, count=3, update_id="u", digest=None, terms=TERMS, hold=False):
    return NamedBucket(update_id, index, count, digest or f"digest of {index}", terms, hold)


def sent(ledger, *buckets):
    """Admit and accept; the states that the update went through."""
    states = []
    for each in buckets:
        assert ledger.admit(each) is None
        states.append(ledger.next_state(each))
        ledger.accept(each, {"message": f"bucket {each.index}"})
    return states


def conflict(ledger, each):
    with pytest.raises(ConflictError) as error:
        ledger.admit(each)
    return str(error.value)


def test_an_update_is_live_with_its_last_bucket_whatever_the_order():
    assert sent(Ledger(), bucket(2), bucket(0), bucket(1)) == ["staging", "staging", "live"]


def test_an_update_of_one_bucket_is_live_at_once():
    assert sent(Ledger(), bucket(0, count=1)) == ["live"]


def test_a_complete_update_may_wait_for_its_commit():
    ledger = Ledger()
    assert sent(ledger, bucket(0, hold=True), bucket(1), bucket(2)) == ["staging", "staging", "staged"]
    assert ledger.to_commit("u") is None
    ledger.committed("u", {"message": "live"})
    assert ledger.updates["u"].state == "live"
    assert ledger.to_commit("u") == {"message": "live"}
    assert ledger.updates["u"].buckets == [0, 1, 2]


def test_the_same_request_gets_its_answer_again_also_after_it_is_live():
    ledger = Ledger()
    sent(ledger, bucket(0))
    assert ledger.admit(bucket(0)) == {"message": "bucket 0"}
    sent(ledger, bucket(1), bucket(2))
    assert ledger.admit(bucket(0)) == {"message": "bucket 0"}
    assert ledger.admit(bucket(2)) == {"message": "bucket 2"}


def test_a_bucket_with_other_bytes_is_a_conflict():
    ledger = Ledger()
    sent(ledger, bucket(0))
    assert "bucket 0 of update_id 'u' has arrived with other bytes" in conflict(ledger, bucket(0, digest="other"))


def test_anything_else_for_a_live_update_is_a_conflict():
    ledger = Ledger()
    sent(ledger, bucket(0, count=1))
    assert "is live" in conflict(ledger, bucket(0, count=1, digest="other"))
    assert "is live" in conflict(ledger, bucket(1, count=2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (bucket(1, count=4), "num_buckets is 4 here, 3 before"),
        (bucket(1, terms=TERMS | {"lora_alpha": 9}), "lora_alpha is 9 here, 8 before"),
        (bucket(1, terms=TERMS | {"weight_version": "2"}), "weight_version is '2' here, '1' before"),
    ],
)
def test_buckets_that_differ_in_their_terms_are_a_conflict(other, message):
    ledger = Ledger()
    sent(ledger, bucket(0))
    assert message in conflict(ledger, other)


def test_a_new_update_abandons_an_unfinished_one():
    ledger = Ledger()
    sent(ledger, bucket(0))
    other = bucket(0, update_id="v")
    assert ledger.abandons(other) == "u"
    sent(ledger, other)
    assert ledger.open_id == "v"
    assert "was abandoned: update 'v' was begun before it was complete" in conflict(ledger, bucket(1))
    assert "was abandoned" in conflict(ledger, bucket(0))


def test_a_live_update_is_not_abandoned():
    ledger = Ledger()
    sent(ledger, bucket(0, count=1), bucket(0, update_id="v"))
    assert ledger.updates["u"].state == "live"


def test_a_refused_bucket_leaves_no_trace():
    ledger = Ledger()
    sent(ledger, bucket(0))
    assert ledger.admit(bucket(1, digest="refused")) is None
    assert sent(ledger, bucket(1), bucket(2)) == ["staging", "live"]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "no bucket of it has arrived"),
        ([bucket(2), bucket(0)], r"buckets \[0, 2\] of 3 have arrived"),
        ([bucket(0, count=1)], "it is live"),
    ],
)
def test_what_cannot_be_committed(buckets, message):
    ledger = Ledger()
    sent(ledger, *buckets)
    with pytest.raises(ConflictError, match=f"'u' cannot be committed: {message}"):
        ledger.to_commit("u")


def test_an_open_update_may_be_aborted_once():
    ledger = Ledger()
    sent(ledger, bucket(0))
    ledger.check_abort("u")
    ledger.abandon("u", "its sender aborted it")
    with pytest.raises(ConflictError, match="cannot be aborted: it is abandoned: its sender aborted it"):
        ledger.check_abort("u")
    assert ledger.open_id is None


def live(ledger, name, *modules):
    """A whole update of modules, in one bucket."""
    each = bucket(0, count=1, update_id=name)
    assert ledger.admit(each) is None
    ledger.accept(each, {"modules": {module: {} for module in modules}})
    ledger.step(modules, "replaced", name)


def states(ledger):
    return {name: update.state for name, update in ledger.updates.items()}


def test_an_update_replaces_those_whose_modules_it_covers():
    ledger = Ledger()
    live(ledger, "one", "m")
    live(ledger, "both", "m", "n")
    live(ledger, "other", "n")
    assert states(ledger) == {"one": "replaced", "both": "live", "other": "live"}


def test_a_rollback_makes_live_what_its_step_had_ended():
    ledger = Ledger()
    live(ledger, "u", "m")
    live(ledger, "v", "m")
    ledger.rolled_back()
    assert states(ledger) == {"u": "live", "v": "rolled back"}
    ledger.step(["m"], "reset")
    assert states(ledger) == {"u": "reset", "v": "rolled back"}
    ledger.rolled_back()
    assert states(ledger) == {"u": "live", "v": "rolled back"}


def test_a_step_without_an_id_leaves_updates_live_and_a_rollback_takes_back_that_step_only():
    ledger = Ledger()
    live(ledger, "u", "m")
    ledger.step(["m"], None)
    ledger.rolled_back()
    assert states(ledger) == {"u": "live"}


@pytest.mark.parametrize("state", ["rolled back", "reset"])
def test_the_same_request_is_a_conflict_once_its_update_is_taken_back(state):
    ledger = Ledger()
    live(ledger, "u", "m")
    if state == "reset":
        ledger.step(["m"], "reset")
    else:
        ledger.rolled_back()
    assert f"'u' was live and is {state}. Send the update again under another id" in conflict(
        ledger, bucket(0, count=1)
    )


def test_where_sglang_has_loaded_other_weights_no_update_is_live_and_none_comes_back():
    ledger = Ledger()
    live(ledger, "u", "m")
    live(ledger, "both", "m", "n")
    ledger.base_is_live(["m", "other"])
    assert states(ledger) == {"u": "replaced", "both": "live"}
    ledger.base_is_live(["m", "n"])
    ledger.rolled_back()
    assert states(ledger) == {"u": "replaced", "both": "reset"}
    message = conflict(ledger, bucket(0, count=1, update_id="both"))
    assert (
        "'both' was live and is reset: sglang has put other weights into its modules. Send the update again" in message
    )


def test_the_same_request_gets_its_answer_again_also_after_it_is_replaced():
    ledger = Ledger()
    live(ledger, "u", "m")
    live(ledger, "v", "m")
    assert ledger.admit(bucket(0, count=1)) == {"modules": {"m": {}}}
    assert "is replaced" in conflict(ledger, bucket(0, count=1, digest="other"))


def test_a_commit_that_was_taken_back_cannot_be_repeated():
    ledger = Ledger()
    sent(ledger, bucket(0, count=1, hold=True))
    ledger.committed("u", {"modules": {"m": {}}})
    ledger.step(["m"], "replaced", "u")
    ledger.rolled_back()
    with pytest.raises(ConflictError, match="'u' cannot be committed: it is rolled back"):
        ledger.to_commit("u")


def test_old_updates_are_forgotten():
    ledger = Ledger()
    for number in range(KEPT_UPDATES + 2):
        sent(ledger, bucket(0, count=1, update_id=str(number)))
    assert len(ledger.updates) == KEPT_UPDATES
    assert "1" not in ledger.updates


def test_what_is_kept_of_large_answers_is_little():
    """An answer lists the fields that it ignored, which a caller may name as it likes; and a skipped layer each."""
    ledger = Ledger()
    tracemalloc.start()
    for number in range(8):
        large = {
            "message": "m" * 2**21,
            "ignored_fields": ["x" * 2**21],
            "skipped": [f"layer {i}" for i in range(10**5)],
        }
        ledger.accept(bucket(count=1, update_id=f"u{number}"), {**large, "modules": {"transformer": {"layers": 1}}})
        del large
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2**20
    answer = ledger.admit(bucket(count=1, update_id="u7"))
    assert answer["modules"] == {"transformer": {"layers": 1}}
    assert answer["skipped"] == [f"layer {i}" for i in range(10)]
    assert len(answer["ignored_fields"][0]) == 80


def test_a_small_answer_is_kept_as_it_was():
    ledger, answer = Ledger(), {"message": "a\nb", "skipped": [f"layer {i}" for i in range(100)], "modules": {}}
    ledger.accept(bucket(count=1), dict(answer))
    assert ledger.admit(bucket(count=1)) == answer


def test_all_that_is_kept_has_a_limit_and_the_oldest_goes_first():
    ledger, answer = Ledger(), {"message": "m" * 16000}
    for number in range(3):
        ledger.accept(bucket(count=1, update_id=f"first {number}", digest="d"), answer)
    most = KEPT_NBYTES // ledger.updates["first 0"].nbytes
    for index in range(most - 1):
        ledger.accept(bucket(index, count=10**6, update_id="many buckets", digest="d"), answer)
    assert list(ledger.updates) == ["first 2", "many buckets"]
    for index in (most, most + 1):
        ledger.accept(bucket(index, count=10**6, update_id="many buckets", digest="d"), answer)
    assert list(ledger.updates) == ["many buckets"]
    assert len(ledger.updates["many buckets"].answers) == most + 1


def test_a_commits_answer_is_kept_within_the_limits_too():
    ledger = Ledger()
    ledger.accept(bucket(count=1, hold=True), {"message": "m", "modules": {}})
    ledger.committed("u", {"message": "m", "skipped": ["x" * 10**6]})
    assert len(json.dumps(ledger.to_commit("u"))) < 1000
