"""Versions never name two weights, and what the engine says of its base weights and of rounding is heeded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_trainer_strategies import Layer, Recorder, arguments, model

from sgld_lora_merge.trainer import DiffusionUpdateWeightFromTensorLoRAIPC, DiffusionUpdateWeightLoRAUpload, SyncError

EVENTS = ["applied", "refused", "applied, and the answer lost", "lost", "restart"]


class Versioned(Recorder):
    """Keeps which weights each version named, as far as they were applied."""

    def __init__(self):
        super().__init__()
        self.event, self.weights, self.named, self.seen = "applied", 0, [], []

    def update(self, fields, file=None):
        if self.event == "refused":
            raise SyncError("400: NaN", answered=400)
        if self.event != "lost":
            self.version = fields["weight_version"]
            self.named.append((self.version, self.weights))
            self.seen.append({"update_id": fields["update_id"], "state": "live", "weight_version": self.version})
        if self.event != "applied":
            raise SyncError("did not answer")
        return super().update(fields, file)

    def answer(self):
        return super().answer() | {"updates": self.seen}


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_version_ever_names_two_weights(events):
    engine, trained = Versioned(), model(a=Layer())
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, engine)
    for engine.event in events:
        if engine.event == "restart":
            sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, engine)
            continue
        engine.weights += 1  # an optimiser's step
        try:
            assert sync.update_weights().version == sync.version
        except SyncError:
            assert engine.event != "applied"
    versions = [version for version, _ in engine.named]
    assert len(set(versions)) == len(versions)
    assert [int(version) for version in versions] == sorted(map(int, versions))


def test_versions_of_others_that_are_numbers_are_passed_and_others_do_not_matter():
    engine = Recorder()
    engine.version = "41"
    assert DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine).update_weights().version == 42
    engine.version = "policy-9"
    assert DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine).update_weights().version == 1


def test_a_mixture_of_versions_counts_too():
    class Mixed(Recorder):
        def answer(self):
            answer = super().answer()
            answer["modules"]["transformer"]["versions"] = {"7": 3, "6": 1}
            return answer

    assert DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), Mixed()).update_weights().version == 8


class Says(Recorder):
    """Says what it is told to of its base weights and of rounding."""

    base, rounded = "loaded", False

    def answer(self):
        answer = super().answer() | {"pairs_rounded": self.rounded}
        for each in answer["modules"].values():
            each["base"] = self.base
        return answer


def test_base_weights_that_something_replaced_are_compared_again():
    engine = Says()
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine)
    sync.update_weights()
    sync.update_weights()
    assert len(engine.of("/lora_merge/verify")) == 1
    engine.base = "full weights, version '2'"
    assert sync.update_weights().version == 3  # they are the trainer's after all
    assert len(engine.of("/lora_merge/verify")) == 2
    engine.base, engine.refuse, engine.answered = "loaded", "/lora_merge/verify", 200
    with pytest.raises(SyncError, match=r"version 4 is live, but something has replaced .*verify answered"):
        sync.update_weights()


def test_rounding_of_pairs_is_said_once(caplog):
    engine = Says()
    engine.rounded = True
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), model(a=Layer()), engine)
    sync.update_weights()
    sync.update_weights()
    assert len([record for record in caplog.records if "more precision than" in record.message]) == 1


def test_other_values_are_sent_inside_and_the_models_own_afterwards():
    sent = []

    class Keeps(Recorder):
        def update(self, fields, file=None):
            sent.append(fields["payload_fingerprint"])
            return super().update(fields, file)

    trained = model(a=Layer())
    sync = DiffusionUpdateWeightFromTensorLoRAIPC(arguments(), trained, Keeps())
    own = {name: each.detach().clone() for name, each in trained.named_parameters() if "lora_" in name}
    sync.update_weights()
    with sync.sending({name: each * 2 for name, each in own.items()}):
        sync.update_weights()
    with sync.sending({"transformer": own}):
        sync.update_weights()
    sync.update_weights()
    assert sent[0] == sent[2] == sent[3] != sent[1]
    assert all(torch.equal(trained.get_parameter(name), each) for name, each in own.items())


@pytest.mark.parametrize("refuse", [None, "/lora_merge/commit", "no"])
def test_uploads_to_two_engines_are_live_on_both_or_on_none(refuse):
    first, second = Recorder(), Recorder(refuse=refuse)
    sync = DiffusionUpdateWeightLoRAUpload(arguments(), model(a=Layer()), [first, second])
    if refuse is None:
        sync.update_weights()
        assert [engine.of("update")[0][0]["commit"] for engine in (first, second)] == [False, False]
        assert set(first.states.values()) == set(second.states.values()) == {"live"}
        return
    with pytest.raises(SyncError):
        sync.update_weights()
    name = {"update_id": next(iter(first.states))}
    if refuse == "no":
        assert [first.of("/lora_merge/commit"), first.of("/lora_merge/abort")] == [[], [(name, None)]]
    else:
        assert first.of("/lora_merge/rollback") == [({}, None)]
        assert second.of("/lora_merge/abort") == [(name, None)]
